"""A search over Ray Tune: which values are tried, which trials are stopped, and what came of them."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from autotuner.space import Parameter, Space
from autotuner.split import register_split
from autotuner.trial import run_trial
from fastamp.config import CfgNode, get_cfg
from fastamp.engine.setup import load_parts
from fastamp.utils.errors import ConfigError
from fastamp.utils.progress import format_duration

# Ray sends statistics of its use to its makers otherwise.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Relative paths in a config, and a data root that is one, stay what they are.
os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"

ALGORITHMS = ("hyperopt", "optuna", "random")
SCHEDULERS = ("asha", "hyperband", "pbt", "none")
# What a training that goes on from another's checkpoint takes as it is told; anything else must be as it was.
MUTABLE = (
    "SOLVER.BASE_LR",
    "SOLVER.*_LR_FACTOR",
    "SOLVER.WEIGHT_DECAY*",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
    "MODEL.LOSSES.*.MARGIN",
    "MODEL.LOSSES.*.SCALE",
    "MODEL.LOSSES.*.EPSILON",
    "INPUT.*.PROB",
)
SCORE, EPOCH = "score", "epoch"


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and with what.

    Attributes:
        cfg: the config that values are put into; its OUTPUT_DIR holds the search.
        space: what is drawn.
        algorithm: one of ``ALGORITHMS``; hyperopt and optuna are tree-structured Parzen estimators.
        scheduler: one of ``SCHEDULERS``; what stops trials that fall behind. ``"pbt"`` (population based training,
            Jaderberg et al. 2017, arXiv:1711.09846) has them go on from better ones with changed values instead; it
            draws at random at first, and changes keys in ``MUTABLE`` alone.
        trials: how many.
        seed: of the draws and of the validation set.
        validation_fraction: of the training identities, that trials are judged on.
        grace_epochs: no trial is stopped before as many.
        cpus, gpus: of a trial; fractions of a GPU are shared.
        max_concurrent: trials at once; 0 is as many as fit.
        max_failures: times that a trial which crashes is tried again.
        parts: file that registers parts of the user's own; empty is none.

    Raises:
        ConfigError: ``"pbt"`` with a search algorithm, or with keys that cannot change in a training.
    """

    cfg: CfgNode
    space: Space
    algorithm: str = "hyperopt"
    scheduler: str = "asha"
    trials: int = 20
    seed: int = 0
    validation_fraction: float = 0.2
    grace_epochs: int = 1
    cpus: float = 1
    gpus: float = 0
    max_concurrent: int = 0
    max_failures: int = 0
    parts: str = ""

    def __post_init__(self) -> None:
        if self.scheduler != "pbt":
            return
        if self.algorithm != "random":
            raise ConfigError(f"--scheduler pbt draws by itself; --srch-algo {self.algorithm} would have no part in it")
        fixed = [key for key in self.space.parameters if not any(fnmatchcase(key, each) for each in MUTABLE)]
        if fixed:
            raise ConfigError(
                f"--scheduler pbt changes values in the midst of a training, and {', '.join(fixed)} cannot change "
                f"there.\n  fix: a space of {', '.join(MUTABLE)}, or another --scheduler"
            )


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        name: Ray's, and that of its folder.
        values: what was drawn, by the keys of the space.
        score: the best, in percent; None without any evaluation.
        epochs: that were trained.
        failure: headline of what ended it before its time; empty for none.
        folder: its OUTPUT_DIR.
        history: (epoch, score) of each report.
    """

    name: str
    values: dict[str, Any]
    score: float | None
    epochs: int
    failure: str
    folder: Path
    history: list[tuple[int, float]] = field(default_factory=list)


def run_search(search: Search) -> list[Outcome]:
    """Run the trials and return what came of each, the best first.

    Raises:
        ConfigError: Ray or the algorithm's package is not installed.
    """
    try:
        import ray
        from ray import tune
    except ImportError as error:
        raise ConfigError('FastTune needs Ray: pip install "fastamp[tune]"') from error

    here = str(Path(__file__).resolve().parents[1])
    variables = {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": variables})
    settings = {
        "config": search.cfg.dump(),
        "parameters": [(each.key, each.kind, each.values) for each in search.space.parameters.values()],
        "fraction": search.validation_fraction,
        "seed": search.seed,
        "parts": search.parts,
    }
    folder = Path(search.cfg.OUTPUT_DIR).resolve()
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(_trainable, settings=settings), {"cpu": search.cpus, "gpu": search.gpus}
        ),
        param_space=_ray_space(search.space),
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="max",
            num_samples=search.trials,
            search_alg=_algorithm(search),
            scheduler=_scheduler(search),
            max_concurrent_trials=search.max_concurrent or None,
            trial_dirname_creator=lambda trial: f"trial_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            # A trial that is paused or copied goes on from its last one; Ray lost trials when two were kept.
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            failure_config=tune.FailureConfig(max_failures=search.max_failures),
            callbacks=[_progress(search.trials)],
            verbose=0,
        ),
    )
    outcomes = [_outcome(result, search.space) for result in tuner.fit()]
    return sorted(outcomes, key=lambda outcome: -1.0 if outcome.score is None else outcome.score, reverse=True)


def _trainable(sample: dict[str, Any], settings: dict[str, Any]) -> None:
    """Run one trial in a process of Ray's."""
    from ray import tune

    cfg = get_cfg()
    if settings["parts"]:
        load_parts(settings["parts"], cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(settings["config"]))
    space = Space([Parameter(*each) for each in settings["parameters"]])
    train, validation = register_split(cfg.DATASETS.NAMES, settings["fraction"], settings["seed"])
    cfg = space.apply(cfg, space.decoded(sample)).clone()
    cfg.defrost()
    cfg.DATASETS.NAMES, cfg.DATASETS.TESTS = (train,), (validation,)
    cfg.MODEL.HEADS.NUM_CLASSES = 0
    cfg.OUTPUT_DIR = str(Path(tune.get_context().get_trial_dir()) / "run")
    cfg.freeze()

    def report(metrics: dict[str, Any], file: Path | None) -> None:
        if file is None:
            tune.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / file.name).write_bytes(file.read_bytes())
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))

    start = tune.get_checkpoint()
    if start is None:
        failure = run_trial(cfg, report)
    else:
        with start.as_directory() as folder:
            failure = run_trial(cfg, report, checkpoint=Path(folder) / "model_tune.pth")
    if failure:
        report({SCORE: 0.0, EPOCH: cfg.SOLVER.MAX_EPOCH, "failure": failure}, None)


def _ray_space(space: Space) -> dict[str, Any]:
    """Return Ray's domains; choices and steps go by number, so that any value and any algorithm goes."""
    from ray import tune

    domains = {}
    for key, each in space.parameters.items():
        if each.kind == "choice":
            domains[key] = tune.choice(list(range(len(each.values))))
        elif each.kind == "quniform":
            domains[key] = tune.randint(0, each.steps + 1)
        else:
            domains[key] = getattr(tune, each.kind)(*each.values)
    return domains


def _algorithm(search: Search) -> Any:
    if search.algorithm == "random":
        from ray.tune.search.basic_variant import BasicVariantGenerator

        return BasicVariantGenerator(random_state=search.seed)
    try:
        __import__(search.algorithm)  # the package has the algorithm's name
    except ImportError as error:
        raise ConfigError(f'--srch-algo {search.algorithm} needs its package: pip install "fastamp[tune]"') from error
    if search.algorithm == "hyperopt":
        from ray.tune.search.hyperopt import HyperOptSearch

        return HyperOptSearch(n_initial_points=max(3, search.trials // 3), random_state_seed=search.seed)
    from ray.tune.search.optuna import OptunaSearch

    return OptunaSearch(seed=search.seed)


def _scheduler(search: Search) -> Any:
    from ray.tune import schedulers

    epochs = search.cfg.SOLVER.MAX_EPOCH
    if search.scheduler == "asha":
        grace = min(max(1, search.grace_epochs), epochs)
        return schedulers.ASHAScheduler(time_attr=EPOCH, max_t=epochs, grace_period=grace, reduction_factor=3)
    if search.scheduler == "pbt":
        return schedulers.PopulationBasedTraining(
            time_attr=EPOCH,
            perturbation_interval=search.cfg.TEST.EVAL_PERIOD,
            burn_in_period=search.grace_epochs,
            hyperparam_mutations=_mutations(search.space),
            custom_explore_fn=_within(search.space),
        )
    if search.scheduler == "hyperband":
        return schedulers.HyperBandScheduler(time_attr=EPOCH, max_t=epochs)
    return schedulers.FIFOScheduler()


def _mutations(space: Space) -> dict[str, Any]:
    """Return Ray's domains, places of choices and steps as lists whose neighbours are near."""
    domains = _ray_space(space)
    for key, each in space.parameters.items():
        if each.kind == "choice":
            domains[key] = list(range(len(each.values)))
        elif each.kind in ("quniform", "randint"):
            first, last = (0, each.steps) if each.kind == "quniform" else each.extremes()
            domains[key] = list(range(first, last + 1))
    return domains


def _within(space: Space) -> Any:
    """Return a function that puts a changed sample back into its ranges."""
    bounds = {key: each.values for key, each in space.parameters.items() if each.kind in ("uniform", "loguniform")}

    def put_back(sample: dict[str, Any]) -> dict[str, Any]:
        return {
            key: min(max(value, bounds[key][0]), bounds[key][1]) if key in bounds else value
            for key, value in sample.items()
        }

    return put_back


def _progress(total: int) -> Any:
    from ray import tune

    class Progress(tune.Callback):
        """Prints a line for each trial that ends: its score, the best so far, and the time left."""

        def __init__(self) -> None:
            self.done, self.best, self.began = 0, float("-inf"), time.perf_counter()

        def on_trial_result(self, iteration: int, trials: Sequence[Any], trial: Any, result: dict, **info: Any) -> None:
            self.best = max(self.best, result.get(SCORE, self.best))

        def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
            self._say(trial, f"score {(trial.last_result or {}).get(SCORE, float('nan')):.2f}")

        def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
            self._say(trial, "failed")

        def _say(self, trial: Any, text: str) -> None:
            self.done += 1
            left = (time.perf_counter() - self.began) / self.done * max(0, total - self.done)
            print(
                f"trial {self.done} of {total} ({trial.trial_id}): {text}; best so far {self.best:.2f}; "
                f"about {format_duration(left)} left",
                file=sys.stderr,
            )

    return Progress()


def _outcome(result: Any, space: Space) -> Outcome:
    """Return what came of one of Ray's results."""
    reports = [] if result.metrics_dataframe is None else result.metrics_dataframe.to_dict("records")
    failures = [row["failure"] for row in reports if isinstance(row.get("failure"), str)]
    if result.error is not None:
        failures.append(str(result.error).strip().splitlines()[-1])
    history = [(int(row[EPOCH]), float(row[SCORE])) for row in reports if not isinstance(row.get("failure"), str)]
    return Outcome(
        name=Path(result.path).name,
        values=space.decoded(result.config or {}),
        score=max((score for _, score in history), default=None),
        epochs=max((epoch for epoch, _ in history), default=0),
        failure="; ".join(failures),
        folder=Path(result.path) / "run",
        history=history,
    )
