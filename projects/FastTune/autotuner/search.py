"""A search over Ray Tune: which values are tried, which trials are stopped, and what came of them."""

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
from autotuner.tune_hooks import EPOCH, SCORE, VALUES, Rounds
from fastamp.config import CfgNode
from fastamp.config.defaults import present_path
from fastamp.utils.errors import ConfigError, writing

ALGORITHMS = ("hyperopt", "bohb", "optuna", "random")
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
_SETTINGS, _OUTCOMES = "search.json", "outcomes.json"
_FORMER_FLAGS = {"--parts": "--plugin"}
EARLIER = {"refine": "search"}
"""Title of a search -> folder of the one before it, whose trials count too."""


def is_mutable(key: str) -> bool:
    """Return whether a key can change in the midst of a training."""
    return any(fnmatchcase(key, pattern) for pattern in MUTABLE)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and with what.

    Attributes:
        title: of this search, for people.
        folder: that holds it, made anew; a search that is in there already is gone on with under ``resume``.
        cfg: the config that values are put into.
        space: what is drawn.
        algorithm: one of ``ALGORITHMS``, or ``"grid"``: each combination of choices once.
        scheduler: one of ``SCHEDULERS``; what stops trials that fall behind. ``"pbt"`` (population based training,
            Jaderberg et al. 2017, arXiv:1711.09846) has them go on from better ones with changed values instead; it
            draws at random at first, and changes keys in ``MUTABLE`` alone.
        trials: how many.
        trials_flag: the command line's flag that says so.
        with_recipe: begin with the recipe's own values, so that no search ends below it.
        seed: of the draws and of the validation set.
        fraction: of the training identities, that trials are judged on; 0 is none, trials are judged on
            ``DATASETS.TESTS``.
        grace_epochs: no trial is stopped before as many.
        cpus, gpus: of a trial; fractions of a GPU are shared.
        max_concurrent: trials at once; 0 is as many as fit.
        max_failures: times that a trial which crashes is tried again.
        plugin: Python file that registers custom components; "" for none.

    Raises:
        ConfigError: an algorithm and a scheduler that do not go together, or ``"pbt"`` with keys that cannot change in
            a training.
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
            raise ConfigError(f"--srch-algo bohb draws by HyperBand's rungs; --scheduler {self.scheduler} has none")
        if self.scheduler != "pbt":
            return
        if self.algorithm != "random":
            raise ConfigError(f"--scheduler pbt draws by itself; --srch-algo {self.algorithm} would have no part in it")
        fixed = [key for key in self.space.parameters if not is_mutable(key)]
        if fixed:
            raise ConfigError(
                f"--scheduler pbt changes values in the midst of a training, and {', '.join(fixed)} cannot change "
                f"there.\n  fix: a space of {', '.join(MUTABLE)}, or another --scheduler"
            )

    @property
    def rounds(self) -> Rounds:
        """The evaluations that schedulers go by."""
        epochs = self.cfg.SOLVER.MAX_EPOCH
        return Rounds(min(self.cfg.TEST.EVAL_PERIOD, epochs), epochs, self.grace_epochs)

    def first(self) -> list[dict[str, Any]]:
        """Return the sample of the recipe itself; none where it is not asked for, or cannot be drawn."""
        sample = self.space.sample_of(self.cfg) if self.with_recipe else None
        return [] if sample is None else [sample]

    def description(self) -> dict[str, Any]:
        """Return what a resume must find unchanged, as flags are called."""
        space = {each.key: {each.kind: list(each.values)} for each in self.space.parameters.values()}
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
    """What came of a trial.

    Attributes:
        stage: title of its search.
        name: Ray's, and that of its folder.
        values: what was drawn, by the keys of the space.
        score: the best that was reached with these values, in percent; None without any evaluation.
        epochs: that were trained.
        failure: headline of what ended it before its time; empty for none.
        folder: its OUTPUT_DIR.
        metrics: of the evaluation with the best score, see ``tune_hooks.TuneReportHook``; ``skipped_steps`` in all,
            the greatest ``peak_memory_mb``, the mean of ``images_per_second``.
        history: (epoch, score) of each report.
        history_values: the values of each report; they change where population based training changes them.
        parents: (epoch, name) of each trial whose checkpoint it continued from, and the epoch of that checkpoint.
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
    """Return how many threads a trial with a number of CPUs computes with."""
    return max(1, int(cpus))


def start_ray(*, address: str, cpus: float, gpus: float) -> None:
    """Start Ray on this machine, or connect to a cluster; nothing where that has been done.

    Args:
        address: of a running cluster, ``"auto"`` for the one that this machine belongs to; empty starts one here.
        cpus, gpus: that a trial will ask for.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or it can never run such a trial.
    """
    # Ray sends statistics of its use to its makers otherwise, takes an interrupt for an end, prints boxes, and writes
    # down what trials there are when they have been under way for 10 s or more.
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
        raise ConfigError('FastTune needs Ray: pip install "fastamp[tune]"') from error
    if not ray.is_initialized():
        here = Path(__file__).resolve().parent
        roots = {name: os.environ[name] for name in ("FASTAMP_DATASETS", "FASTREID_DATASETS") if name in os.environ}
        # A trial has as many threads as CPUs, whatever this process has.
        threads = {"OMP_NUM_THREADS": str(threads_of(cpus))}
        environment = {"env_vars": roots | threads, "py_modules": [str(here)]}
        # Ray's processes inherit the mask. One that ended by a signal to the whole group would take this one with it,
        # before it could say how to resume.
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
                f"--address {address}: no Ray cluster answers there.\n  fix: ray start --head on one machine and ray "
                "start --address on the others, or leave --address out to search on this machine alone"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    there = ray.cluster_resources()
    for flag, asked, kind in (("--cpus-per-trial", cpus, "CPU"), ("--gpus-per-trial", gpus, "GPU")):
        if asked > there.get(kind, 0):
            raise ConfigError(
                f"{flag} {asked:g} is more than Ray found: {there.get(kind, 0):g} {kind}s; no trial could ever start"
            )


def shut_down_ray() -> None:
    """End what ``start_ray`` has started, or leave the cluster."""
    import ray

    ray.shutdown()


def concurrent_trials(search: Search) -> int:
    """Return how many trials run at once on what Ray has; it must have been started."""
    import ray

    there = ray.cluster_resources()
    fit = [there.get(kind, 0) / asked for kind, asked in (("CPU", search.cpus), ("GPU", search.gpus)) if asked]
    return max(1, min(int(min(fit)), search.max_concurrent or search.trials))


def run_search(search: Search, *, resume: bool = False) -> list[Outcome]:
    """Run the trials and return what came of each, the best first; Ray must have been started.

    Args:
        search: what is searched.
        resume: go on with the search that is in its folder, if there is one.

    Raises:
        ConfigError: the folder has a search and ``resume`` is off; it is another one; the search cannot be resumed; or
            the algorithm's package is not installed.
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
        resumed=began and search.scheduler != "pbt",  # where a trial may have to continue from another's
        threads=threads_of(search.cpus),
    )
    trainable = tune.with_resources(
        tune.with_parameters(ray_trial, settings=settings), {"cpu": search.cpus, "gpu": search.gpus}
    )
    random.seed(search.seed)  # from which PBT draws
    np.random.seed(search.seed)
    tuner = tune.Tuner.restore(str(search.folder), trainable) if began else _new_tuner(search, trainable)
    results = tuner.fit()
    outcomes = best_first(outcome_of(Path(each.path), each.config, each.error, search) for each in results)
    _write_outcomes(search.folder, outcomes)
    prune_losers(outcomes, search)
    return outcomes


def prune_losers(outcomes: list[Outcome], search: Search) -> None:
    """Delete the checkpoints of trials that have ended, and the best weights of all but the winner.

    Args:
        outcomes: of these trials, the best first.
        search: where it trains on all identities (``fraction`` 0), no trial is a loser.
    """
    winner = winner_of(outcomes)
    for each in outcomes:
        prune(each.folder, keep_best=each is winner or not search.fraction)


def _new_tuner(search: Search, trainable: Any) -> Any:
    """Return Ray's tuner for a search that begins."""
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
            # Trials that are paused go on at once in a process that is there.
            reuse_actors=search.scheduler in ("pbt", "hyperband"),
            trial_dirname_creator=lambda trial: f"trial_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=search.folder.name,
            storage_path=str(search.folder.parent),
            # A trial that is paused or copied continues from its last one; Ray lost trials when two were kept. They
            # name files of the trial and are small.
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            failure_config=tune.FailureConfig(max_failures=search.max_failures),
            callbacks=[Progress(search)],
            verbose=0,
        ),
    )


def best_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return trials by their scores, then those that failed, then those without any evaluation; equal ones by name."""
    return sorted(
        sorted(outcomes, key=lambda outcome: outcome.name),
        key=lambda outcome: (outcome.score is not None, not outcome.failure, outcome.score or 0.0),
        reverse=True,
    )


def winner_of(outcomes: list[Outcome]) -> Outcome | None:
    """Return the first of trials that are best first, None where none came to its end with an evaluation."""
    return outcomes[0] if outcomes and outcomes[0].score is not None and not outcomes[0].failure else None


def _check_folder(search: Search, *, resume: bool) -> bool:
    """Write down what is searched, or check it against what is written; return whether there is something to resume."""
    file = search.folder / _SETTINGS
    facts = search.description()
    if not file.is_file():
        with writing(search.folder):
            search.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if resume:
            print(f"--resume: no search is in {search.folder} yet; it begins")
        return False
    if not resume:
        raise ConfigError(
            f"{search.folder} holds a search already.\n  fix: --resume goes on with it; or set OUTPUT_DIR to another "
            "folder"
        )
    before = json.loads(file.read_text(encoding="utf-8"))
    before = {_FORMER_FLAGS.get(name, present_path(name)): value for name, value in before.items()}
    changed = [
        f"{name} was {before.get(name)} and is {facts.get(name)}"
        for name in before | facts
        if before.get(name) != facts.get(name)
    ]
    if before.get(search.trials_flag) != search.trials:
        changed = changed[[search.trials_flag in each for each in changed].index(True) :][:1]
    if changed:
        raise ConfigError(f"--resume goes on with a search as it was begun, but {'; '.join(changed)}")
    began = any(search.folder.glob("experiment_state-*.json"))
    if began and search.scheduler == "hyperband" and not (search.folder / _OUTCOMES).is_file():
        raise ConfigError(
            f"{search.folder}: a search with --scheduler hyperband, which BOHB has too, cannot be resumed: its rungs "
            "are not saved, and trials would be stopped in the wrong place.\n  fix: set OUTPUT_DIR to another folder "
            "and begin again; --scheduler asha can be resumed"
        )
    return began


def outcome_of(path: Path, sample: dict[str, Any] | None, error: Exception | None, search: Search) -> Outcome:
    """Return what came of one of Ray's trials so far.

    Args:
        path: the trial's folder in that of its search.
        sample: what Ray drew last for it.
        error: that it crashed with.
        search: that it is of.
    """
    folder = run_dir(path)
    rows = read_reports(folder)
    failure = rows[-1].get(FAILURE, "") if rows else ""
    if error is not None:
        failure = str(error).strip().splitlines()[-1]
    values = search.space.decoded(sample or {})
    if rows and rows[-1][VALUES] != plain_values(values):
        # It took over another trial's end, with other values, and trained no more.
        values = _with_tuples(rows[-1][VALUES])
    judged = [row for row in rows if FAILURE not in row]
    # Of a trial that went on with other values, what it reached with them counts.
    reports = [row for row in judged if row[VALUES] == plain_values(values)]
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
        epochs=max((int(row[EPOCH]) for row in judged), default=0),
        failure=failure,
        folder=folder,
        metrics={name: float(value) for name, value in metrics.items()},
        history=[(int(row[EPOCH]), float(row[SCORE])) for row in judged],
        history_values=[row[VALUES] for row in judged],
        parents=[(int(row[PARENT][0]), f"trial_{row[PARENT][1]}") for row in judged if PARENT in row],
    )


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return values that were written down as they were before."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _write_outcomes(folder: Path, outcomes: list[Outcome]) -> None:
    rows = [asdict(each) | {"folder": str(each.folder)} for each in outcomes]
    with writing(folder):
        (folder / _OUTCOMES).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def read_outcomes(folder: Path) -> list[Outcome]:
    """Return what came of a search that has ended, nothing where there is none in the folder."""
    if not (folder / _OUTCOMES).is_file():
        return []
    rows = json.loads((folder / _OUTCOMES).read_text(encoding="utf-8"))
    return [
        Outcome(
            **row
            | {
                "folder": run_dir(folder / row["name"]),  # not the recorded path: the folder may have been moved
                "history": [tuple(point) for point in row["history"]],
                "parents": [tuple(each) for each in row.get("parents", [])],
                "values": _with_tuples(row["values"]),
            }
        )
        for row in rows
    ]
