"""Ray Tune domains, search algorithms and schedulers."""

from typing import Any

import ray.tune
from ray.tune import schedulers
from ray.tune.search import create_searcher

from autotuner.settings import Search
from autotuner.space import Space
from autotuner.trial import read_reports, run_dir
from autotuner.tune_hooks import ROUND
from fastamp.utils.errors import optional_package

# Algorithm -> packages besides Ray, the extra that installs them, and a note for the error message.
_PACKAGES = {
    "hyperopt": (("hyperopt",), "tune", ""),
    "optuna": (("optuna",), "tune", ""),
    "bohb": (
        ("hpbandster", "ConfigSpace"),
        "bohb",
        "\n  note: hpbandster is no longer maintained, and installing its dependency netifaces needs a C compiler and "
        "Python headers. --srch-algo optuna --scheduler hyperband is similar",
    ),
}


class ResumedASHA(schedulers.ASHAScheduler):
    """ASHA (Li et al. 2020, arXiv:1810.05934) that restores its rungs from the reports of earlier trials on resume.

    Reports are read from ``trial.path``, which is correct even if the search folder was moved. The scheduler does not
    store the path, because Ray pickles the scheduler, and a pickled path would be wrong after a move.
    """

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        if trial.storage.trial_dir_name is None:  # a new trial has no folder yet
            return
        for result in read_reports(run_dir(trial.path)):
            super().on_trial_result(tune_controller, trial, result)


class PopulationBasedTraining(schedulers.PopulationBasedTraining):
    """Synchronous population based training that removes failed trials from the population.

    Ray perturbs the population when the last trial of a round has reported. A trial that ends early never reports, so
    the other trials would wait forever.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(synch=True, **options)
        self._ended: set[Any] = set()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
        for ended in self._ended:
            self._trial_state[ended].last_score = None
            self._trial_state[ended].last_train_time = self._next_perturbation_sync
        return super().on_trial_result(tune_controller, trial, result)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
        super().on_trial_complete(tune_controller, trial, result)
        self._remove(tune_controller, trial)

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_error(tune_controller, trial)
        self._remove(tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_remove(tune_controller, trial)
        self._remove(tune_controller, trial)

    def _remove(self, tune_controller: Any, trial: Any) -> None:
        """Remove a trial from the population; if all other trials wait for this trial, perturb the population."""
        self._ended.add(trial)
        others = [
            trial for trial in tune_controller.get_trials() if trial not in self._ended and not trial.is_finished()
        ]
        states = [self._trial_state[trial] for trial in others]
        if states and all(state.last_train_time >= self._next_perturbation_sync for state in states):
            self.on_trial_result(tune_controller, others[-1], states[-1].last_result)


def ray_space(space: Space, algorithm: str) -> dict[str, Any]:
    """Return the Ray Tune domain of each key.

    Choices and steps are represented by indices, because not every algorithm supports values of any type.
    """
    domains = {}
    for key, parameter in space.parameters.items():
        if parameter.kind == "choice":
            indices = list(range(len(parameter.values)))
            domains[key] = ray.tune.grid_search(indices) if algorithm == "grid" else ray.tune.choice(indices)
        elif parameter.kind == "quniform":
            domains[key] = ray.tune.randint(0, parameter.steps + 1)
        else:
            domains[key] = getattr(ray.tune, parameter.kind)(*parameter.values)
    return domains


def search_algorithm(search: Search) -> Any:
    """Build the Ray Tune search algorithm.

    It is ``"hyperopt"`` or ``"optuna"`` (tree-structured Parzen estimators, Bergstra et al. 2011), ``"bohb"`` (Falkner
    et al. 2018, arXiv:1807.01774), ``"random"`` or ``"grid"``; the last two require only Ray.

    Raises:
        ConfigError: if a package of the algorithm is not installed.
    """
    packages, extra, note = _PACKAGES.get(search.algorithm, ((), "", ""))
    with optional_package(f"--srch-algo {search.algorithm} requires {' and '.join(packages)}", extra, note):
        for package in packages:
            __import__(package)
    return create_searcher(
        "random" if search.algorithm == "grid" else search.algorithm,
        points_to_evaluate=search.first() or None,
        # Each class takes the arguments that it has; the seed has three names.
        n_initial_points=max(3, search.trials // 3),
        **dict.fromkeys(("seed", "random_state", "random_state_seed"), search.seed),
    )


def scheduler(search: Search) -> Any:
    """Build the Ray Tune scheduler.

    It is ``"asha"``, ``"hyperband"`` (Li et al. 2018, arXiv:1603.06560; with the algorithm ``"bohb"`` Ray's
    HyperBandForBOHB), ``"pbt"``, which perturbs the keys of the space, or ``"none"``.
    """
    rounds = search.rounds.total
    if search.scheduler == "asha":
        return ResumedASHA(time_attr=ROUND, max_t=rounds, grace_period=1, reduction_factor=3)
    if search.scheduler == "hyperband":
        kind = schedulers.HyperBandForBOHB if search.algorithm == "bohb" else schedulers.HyperBandScheduler
        return kind(time_attr=ROUND, max_t=rounds, reduction_factor=3)
    if search.is_population:
        # Asynchronous PBT may exploit the same checkpoint repeatedly when trials run in turns.
        return PopulationBasedTraining(
            time_attr=ROUND,
            perturbation_interval=1,
            hyperparam_mutations=_mutations(search.space),
            custom_explore_fn=_clamp_fn(search.space),
        )
    return schedulers.FIFOScheduler()


def _mutations(space: Space) -> dict[str, Any]:
    """Return Ray Tune domains for PBT: choices, steps and integers as ordered lists, to mutate to adjacent values."""
    domains = ray_space(space, "random")
    for key, parameter in space.parameters.items():
        if parameter.kind == "choice":
            domains[key] = list(range(len(parameter.values)))
        elif parameter.kind in ("quniform", "randint"):
            first, last = (0, parameter.steps) if parameter.kind == "quniform" else parameter.extremes()
            domains[key] = list(range(first, last + 1))
    return domains


def _clamp_fn(space: Space) -> Any:
    """Return a function that clamps a perturbed sample to the ranges of the space."""
    ranges = [parameter for parameter in space.parameters.values() if parameter.kind in ("uniform", "loguniform")]

    def clamp(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {parameter.key: parameter.encode(sample[parameter.key]) for parameter in ranges}

    return clamp
