"""Hyperparameter search on Ray Tune: settings, execution, and outcomes of the trials."""

import json
import logging
import os
import random
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from autotuner.space import Space
from autotuner.trial import FAILURE, PARENT, TrialSettings, plain_values, prune, ray_trial, read_reports, run_dir
from autotuner.tune_hooks import EPOCH, SCORE, VALUES, EvalRounds
from fastamp.config import CfgNode
from fastamp.utils.errors import ConfigError, writing

ALGORITHMS = ("hyperopt", "bohb", "optuna", "random")
SCHEDULERS = ("asha", "hyperband", "pbt", "none")
# Keys that may change when a run resumes from a checkpoint; all other keys must stay the same.
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
_SETTINGS, _OUTCOMES = "search.json", "outcomes.json"
EARLIER = {"refine": "search"}
"""Title of a search -> folder of the preceding search, whose trials are part of the results."""


def is_mutable(key: str) -> bool:
    """Return True if the key can change during training."""
    return any(fnmatchcase(key, pattern) for pattern in MUTABLE)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search.

    Attributes:
        title: name of the search in messages and results.
        folder: folder of the search. If the folder already contains a search, ``run_search`` can only resume it.
        cfg: base config of the trials.
        space: search space.
        algorithm: one of ``ALGORITHMS``, or ``"grid"`` (each combination of choices once). Default ``"hyperopt"``.
        scheduler: one of ``SCHEDULERS``. ``"pbt"`` (population based training, Jaderberg et al. 2017,
            arXiv:1711.09846) does not stop trials with low scores; they continue from checkpoints of better trials with
            perturbed values. The initial values are sampled at random, and only keys in ``MUTABLE`` can be searched.
            Default ``"asha"``.
        trials: number of trials. Default 20.
        trials_flag: command-line flag that sets ``trials``, for messages. Default ``"--num-trials"``.
        with_recipe: use the values of the recipe in the first trial, so that the winner is at least as good as the
            recipe. Default True.
        seed: seed of the sampling and of the validation split. Default 0.
        fraction: fraction of the training identities to hold out for validation, in 0..1. With 0, trials are
            evaluated on ``DATASETS.TESTS``. Default 0.2.
        grace_epochs: number of epochs during which no trial is stopped. Default 0.
        cpus, gpus: resources per trial; a fractional GPU is shared. Default 1 and 0.
        max_concurrent: maximum number of concurrent trials; 0 for as many as fit. Default 0.
        max_failures: maximum number of restarts of a crashed trial. Default 0.
        plugin: Python file that registers custom components; "" for none.

    Raises:
        ConfigError: if the algorithm and the scheduler are incompatible, or the scheduler is ``"pbt"`` and the space
            contains keys that cannot change during training.
    """

    title: str
    folder: Path
    cfg: CfgNode
    space: Space
    algorithm: str = "hyperopt"
    scheduler: str = "asha"
    trials: int = 20
    trials_flag: str = "--num-trials"
    with_recipe: bool = True
    seed: int = 0
    fraction: float = 0.2
    grace_epochs: int = 0
    cpus: float = 1
    gpus: float = 0
    max_concurrent: int = 0
    max_failures: int = 0
    plugin: str = ""

    def __post_init__(self) -> None:
        if self.algorithm == "bohb" and self.scheduler != "hyperband":
            raise ConfigError(
                f"--srch-algo bohb requires --scheduler hyperband, got --scheduler {self.scheduler}.\n"
                "  fix: remove --scheduler, or choose another --srch-algo"
            )
        if self.scheduler != "pbt":
            return
        if self.algorithm != "random":
            raise ConfigError(
                f"--scheduler pbt samples values itself, so --srch-algo {self.algorithm} has no effect.\n"
                "  fix: remove --srch-algo"
            )
        fixed = [key for key in self.space.parameters if not is_mutable(key)]
        if fixed:
            raise ConfigError(
                f"--scheduler pbt changes values during training; {', '.join(fixed)} must stay constant.\n"
                f"  fix: search only {', '.join(MUTABLE)}, or choose another --scheduler"
            )

    @property
    def rounds(self) -> EvalRounds:
        """Evaluations that count for the scheduler."""
        epochs = self.cfg.SOLVER.MAX_EPOCH
        return EvalRounds(min(self.cfg.TEST.EVAL_PERIOD, epochs), epochs, self.grace_epochs)

    def first(self) -> list[dict[str, Any]]:
        """Return ``[sample]`` with the recipe's values; [] if ``with_recipe`` is False or a value is not a choice."""
        sample = self.space.sample_of(self.cfg) if self.with_recipe else None
        return [] if sample is None else [sample]

    def description(self) -> dict[str, Any]:
        """Return the settings that must not change on resume, keyed by flag or config key."""
        space = {
            parameter.key: {parameter.kind: list(parameter.values)} for parameter in self.space.parameters.values()
        }
        config = {key.path: value for key, value in self.cfg.keys_below() if key.path != "OUTPUT_DIR"}
        facts = {
            "--srch-algo": self.algorithm,
            "--scheduler": self.scheduler,
            self.trials_flag: self.trials,
            "--seed": self.seed,
            "TUNE.VAL_FRACTION": self.fraction,
            "--cpus-per-trial": self.cpus,
            "--gpus-per-trial": self.gpus,
            "--max-concurrent": self.max_concurrent,
            "--max-failures": self.max_failures,
            "--plugin": self.plugin,
            "--space": space,
        }
        return json.loads(json.dumps(facts | config, default=dict))


@dataclass(frozen=True)
class Outcome:
    """Result of a trial: sampled values, scores and metrics, and the error if the trial failed.

    Attributes:
        stage: title of the search.
        name: name of the trial's folder: ``trial_`` followed by Ray Tune's trial ID.
        values: config key or ``IDENTITIES`` -> last sampled value.
        score: best score with these values, in percent; None if the trial was not evaluated with them.
        epochs: number of completed epochs.
        failure: first line of the error that ended the trial; empty if it did not fail.
        folder: OUTPUT_DIR of the trial.
        metrics: ``mAP`` and ``Rank-1`` of the evaluation with the best score; ``skipped_steps`` up to the last
            evaluation; and the maximum of ``peak_memory_mb`` and the mean of ``images_per_second`` over the evaluations
            with these values. See ``tune_hooks.TuneReportHook``.
        history: ``(epoch, score)`` of each report.
        history_values: sampled values at each report; population based training changes them.
        parents: ``(epoch, trial name)`` for each time this trial continued from a checkpoint of another trial.
    """

    stage: str
    name: str
    values: dict[str, Any]
    score: float | None
    epochs: int
    failure: str
    folder: Path
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[tuple[int, float]] = field(default_factory=list)
    history_values: list[dict[str, Any]] = field(default_factory=list)
    parents: list[tuple[int, str]] = field(default_factory=list)


def threads_of(cpus: float) -> int:
    """Return the number of threads for a trial with ``cpus`` CPUs, at least 1."""
    return max(1, int(cpus))


def start_ray(*, address: str, cpus: float, gpus: float) -> None:
    """Start Ray on this machine or connect to a cluster, unless Ray is already initialized.

    Args:
        address: address of a running cluster; ``"auto"`` for the cluster of this machine; empty to start Ray locally.
        cpus, gpus: resources per trial.

    Raises:
        ConfigError: if Ray is not installed, the cluster is not reachable, or it has too few resources for one trial.
    """
    # Disable usage statistics, Ray's own SIGINT handler and its table output; save the experiment state every 2 s
    # instead of every 10 s or more.
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("TUNE_DISABLE_SIGINT_HANDLER", "1"),
        ("RAY_AIR_NEW_OUTPUT", "0"),
        ("TUNE_GLOBAL_CHECKPOINT_S", "2"),
        ("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0"),
    ):
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            'Ray is not installed, but FastTune requires it.\n  fix: pip install "fastamp[tune]"'
        ) from error
    if not ray.is_initialized():
        here = Path(__file__).resolve().parent
        roots = {name: os.environ[name] for name in ("FASTAMP_DATASETS", "FASTREID_DATASETS") if name in os.environ}
        # The number of threads of a trial does not depend on OMP_NUM_THREADS of this process.
        threads = {"OMP_NUM_THREADS": str(threads_of(cpus))}
        environment = {"env_vars": roots | threads, "py_modules": [str(here)]}
        # Ray's processes inherit the signal mask. Otherwise a SIGTERM to the process group would end them, and with
        # them this process, before it prints how to resume.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env=environment,
                **({} if address else {"include_dashboard": False}),
            )
        except ConnectionError as error:
            raise ConfigError(
                f"--address {address}: cannot connect to a Ray cluster.\n  fix: run `ray start --head` on one machine "
                "and `ray start --address` on the others, or remove --address to search on this machine only"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    available = ray.cluster_resources()
    for flag, asked, kind in (("--cpus-per-trial", cpus, "CPU"), ("--gpus-per-trial", gpus, "GPU")):
        if asked > available.get(kind, 0):
            raise ConfigError(
                f"{flag} is {asked:g}, but Ray has {available.get(kind, 0):g} {kind}s, so no trial can start.\n"
                f"  fix: lower {flag}, or add machines to the cluster"
            )


def shut_down_ray() -> None:
    """Shut down the local Ray instance, or disconnect from the cluster."""
    import ray

    ray.shutdown()


def concurrent_trials(search: Search) -> int:
    """Return the number of trials that run at once: as many as fit on Ray's CPUs and GPUs, up to ``max_concurrent``.

    Ray must be initialized.
    """
    import ray

    available = ray.cluster_resources()
    fit = [available.get(kind, 0) / asked for kind, asked in (("CPU", search.cpus), ("GPU", search.gpus)) if asked]
    return max(1, min(int(min(fit)), search.max_concurrent or search.trials))


def run_search(search: Search, *, resume: bool = False) -> list[Outcome]:
    """Run the trials and return their outcomes, best first; Ray must be initialized.

    Args:
        search: settings of the search.
        resume: continue the search in its folder, if there is one.

    Raises:
        ConfigError: if the folder already contains a search, and ``resume`` is False, the settings differ from
            ``search`` or the scheduler does not support resuming; or if a package of the algorithm is not installed.
    """
    from ray import tune

    began = _check_folder(search, resume=resume)
    if (search.folder / _OUTCOMES).is_file():
        return read_outcomes(search.folder)
    settings = TrialSettings(
        config=search.cfg.dump(),
        space=search.space,
        rounds=search.rounds,
        fraction=search.fraction,
        seed=search.seed,
        plugin=search.plugin,
        here=os.getcwd(),
        folder=str(search.folder),
        population=search.scheduler == "pbt",
        resumed=began and search.scheduler != "pbt",  # a PBT trial may continue from another trial instead
        threads=threads_of(search.cpus),
    )
    trainable = tune.with_resources(
        tune.with_parameters(ray_trial, settings=settings), {"cpu": search.cpus, "gpu": search.gpus}
    )
    random.seed(search.seed)  # PBT samples from the global generators
    np.random.seed(search.seed)
    tuner = tune.Tuner.restore(str(search.folder), trainable) if began else _new_tuner(search, trainable)
    results = tuner.fit()
    outcomes = best_first(outcome_of(Path(result.path), result.config, result.error, search) for result in results)
    _write_outcomes(search.folder, outcomes)
    prune_losers(outcomes, search)
    return outcomes


def prune_losers(outcomes: list[Outcome], search: Search) -> None:
    """Delete the checkpoints of finished trials, and the best weights of all trials except the winner.

    Args:
        outcomes: finished trials, best first.
        search: settings of the search. If ``fraction`` is 0, all trials keep their best weights.
    """
    winner = winner_of(outcomes)
    for outcome in outcomes:
        prune(outcome.folder, keep_best=outcome is winner or not search.fraction)


def _new_tuner(search: Search, trainable: Any) -> Any:
    """Build the Ray tuner of a new search."""
    from ray import tune

    from autotuner.algorithms import ray_space, scheduler, search_algorithm
    from autotuner.progress import Progress

    return tune.Tuner(
        trainable,
        param_space=ray_space(search.space, search.algorithm),
        tune_config=tune.TuneConfig(
            metric=SCORE,
            mode="max",
            num_samples=1 if search.algorithm == "grid" else search.trials,
            search_alg=search_algorithm(search.algorithm, trials=search.trials, seed=search.seed, first=search.first()),
            scheduler=scheduler(
                search.scheduler,
                rounds=search.rounds.total,
                space=search.space,
                algorithm=search.algorithm,
            ),
            max_concurrent_trials=search.max_concurrent or None,
            # Paused trials resume in an existing process, without starting a new one.
            reuse_actors=search.scheduler in ("pbt", "hyperband"),
            trial_dirname_creator=lambda trial: f"trial_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=search.folder.name,
            storage_path=str(search.folder.parent),
            # A paused or copied trial continues from its last checkpoint; with two kept, Ray lost trials. They only
            # contain file names, so they are small.
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            failure_config=tune.FailureConfig(max_failures=search.max_failures),
            callbacks=[Progress(search)],
            verbose=0,
        ),
    )


def best_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Sort outcomes: successful trials first, then failed trials with a score, then trials without a score.

    Each group is sorted by descending score, and trials with equal scores by name.
    """
    return sorted(
        sorted(outcomes, key=lambda outcome: outcome.name),
        key=lambda outcome: (outcome.score is not None, not outcome.failure, outcome.score or 0.0),
        reverse=True,
    )


def winner_of(outcomes: list[Outcome]) -> Outcome | None:
    """Return the first of ``outcomes``, which are sorted best first; None if this trial failed or has no score."""
    return outcomes[0] if outcomes and outcomes[0].score is not None and not outcomes[0].failure else None


def _check_folder(search: Search, *, resume: bool) -> bool:
    """Write the settings of a new search, or check that they equal the saved settings of the search to resume.

    Returns:
        True if there are trials to resume.
    """
    file = search.folder / _SETTINGS
    facts = search.description()
    if not file.is_file():
        with writing(search.folder):
            search.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if resume:
            print(f"no search to resume in {search.folder}: starting a new one")
        return False
    if not resume:
        raise ConfigError(
            f"{search.folder} already contains a search.\n  fix: continue it with --resume, or set OUTPUT_DIR to "
            "another folder"
        )
    saved = json.loads(file.read_text(encoding="utf-8"))
    # Keys of later versions had their default values.
    before = json.loads(json.dumps({key.path: key.default for key, _ in search.cfg.keys_below()}, default=dict))
    del before["OUTPUT_DIR"]
    before |= saved
    changed = [
        f"{name} was {before.get(name)}, got {facts.get(name)}"
        for name in before | facts
        if before.get(name) != facts.get(name)
    ]
    if before.get(search.trials_flag) != search.trials:
        changed = changed[[search.trials_flag in flags for flags in changed].index(True) :][:1]
    if changed:
        raise ConfigError(
            f"cannot resume the search in {search.folder} with other settings: {'; '.join(changed)}.\n"
            "  fix: repeat the command that started the search, or set OUTPUT_DIR to another folder"
        )
    began = any(search.folder.glob("experiment_state-*.json"))
    if began and search.scheduler == "hyperband" and not (search.folder / _OUTCOMES).is_file():
        raise ConfigError(
            f"{search.folder}: a search with --scheduler hyperband (also used by bohb) cannot be resumed, because its "
            "rungs are not saved.\n  fix: start a new search with another OUTPUT_DIR; --scheduler asha can be resumed"
        )
    return began


def outcome_of(path: Path, sample: dict[str, Any] | None, error: Exception | None, search: Search) -> Outcome:
    """Return the current outcome of a Ray trial.

    Args:
        path: folder of the trial in the search folder.
        sample: last sample of the trial.
        error: exception that ended the trial, or None.
        search: settings of the search.
    """
    folder = run_dir(path)
    rows = read_reports(folder)
    failure = rows[-1].get(FAILURE, "") if rows else ""
    if error is not None:
        failure = str(error).strip().splitlines()[-1]
    values = search.space.decoded(sample or {})
    if rows and rows[-1][VALUES] != plain_values(values):
        # PBT copied a finished trial and perturbed the values, and no epoch was left to train.
        values = _with_tuples(rows[-1][VALUES])
    evaluated = [row for row in rows if FAILURE not in row]
    # If the values changed during the trial, only evaluations with the last values count.
    reports = [row for row in evaluated if row[VALUES] == plain_values(values)]
    metrics = {}
    if reports:
        best = max(reports, key=lambda row: row[SCORE])
        metrics = {
            "mAP": best["mAP"],
            "Rank-1": best["Rank-1"],
            "skipped_steps": reports[-1]["skipped_steps"],
            "peak_memory_mb": max(row["peak_memory_mb"] for row in reports),
            "images_per_second": sum(row["images_per_second"] for row in reports) / len(reports),
        }
    scores = [float(row[SCORE]) for row in reports]
    return Outcome(
        stage=search.title,
        name=path.name,
        values=values,
        score=max(scores, default=None),
        epochs=max((int(row[EPOCH]) for row in evaluated), default=0),
        failure=failure,
        folder=folder,
        metrics={name: float(value) for name, value in metrics.items()},
        history=[(int(row[EPOCH]), float(row[SCORE])) for row in evaluated],
        history_values=[row[VALUES] for row in evaluated],
        parents=[(int(row[PARENT][0]), f"trial_{row[PARENT][1]}") for row in evaluated if PARENT in row],
    )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Restore tuples, which JSON stores as lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _write_outcomes(folder: Path, outcomes: list[Outcome]) -> None:
    rows = [asdict(outcome) | {"folder": str(outcome.folder)} for outcome in outcomes]
    with writing(folder):
        (folder / _OUTCOMES).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read the outcomes of a finished search; [] if the folder contains no finished search."""
    if not (folder / _OUTCOMES).is_file():
        return []
    rows = json.loads((folder / _OUTCOMES).read_text(encoding="utf-8"))
    return [
        Outcome(
            **row
            | {
                "folder": run_dir(folder / row["name"]),  # not the recorded path: the folder may have been moved
                "history": [tuple(point) for point in row["history"]],
                "parents": [tuple(parent) for parent in row.get("parents", [])],
                "values": _with_tuples(row["values"]),
            }
        )
        for row in rows
    ]
