"""Hyperparameter search on Ray Tune: execution, and outcomes of the trials."""

import json
import logging
import os
import random
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotuner.settings import Search
from autotuner.trial import FAILURE, PARENT, ray_trial, read_reports, run_dir
from autotuner.tune_hooks import EPOCH, SCORE, VALUES
from fastamp.utils.errors import ConfigError, optional_package, writing

_SETTINGS, _OUTCOMES = "search.json", "outcomes.json"


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


def start_ray(search: Search, *, address: str) -> None:
    """Start Ray on this machine or connect to a cluster, unless Ray is already initialized.

    Args:
        search: settings of the search.
        address: address of a running cluster; ``"auto"`` for the cluster of this machine; empty to start Ray locally.

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
    with optional_package("FastTune requires Ray", "tune"):
        import ray
    if not ray.is_initialized():
        here = Path(__file__).resolve().parent
        roots = {name: os.environ[name] for name in ("FASTAMP_DATASETS", "FASTREID_DATASETS") if name in os.environ}
        # The number of threads of a trial does not depend on OMP_NUM_THREADS of this process.
        threads = {"OMP_NUM_THREADS": str(search.threads)}
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
    for flag, asked, kind in (("--cpus-per-trial", search.cpus, "CPU"), ("--gpus-per-trial", search.gpus, "GPU")):
        if asked > available.get(kind, 0):
            raise ConfigError(
                f"{flag} is {asked:g}, but Ray has {available.get(kind, 0):g} {kind}s, so no trial can start.\n"
                f"  fix: lower {flag}, or add machines to the cluster"
            )


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
    # A PBT trial may continue from another trial instead.
    parameters = {"search": search, "here": os.getcwd(), "resumed": began and not search.is_population}
    trainable = tune.with_resources(
        tune.with_parameters(ray_trial, **parameters), {"cpu": search.cpus, "gpu": search.gpus}
    )
    random.seed(search.seed)  # PBT samples from the global generators
    np.random.seed(search.seed)
    tuner = tune.Tuner.restore(str(search.folder), trainable) if began else _new_tuner(search, trainable)
    results = tuner.fit()
    outcomes = best_first(outcome_of(Path(result.path), result.config, result.error, search) for result in results)
    with writing(search.folder):
        rows = [asdict(outcome) for outcome in outcomes]
        (search.folder / _OUTCOMES).write_text(json.dumps(rows, default=str, indent=1), encoding="utf-8")
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
        keeps_best = outcome is winner or not search.fraction
        for file in outcome.folder.glob("model_*.pth"):
            if not (keeps_best and file.name == "model_best.pth"):
                file.unlink(missing_ok=True)


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
            search_alg=search_algorithm(search),
            scheduler=scheduler(search),
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
    # Keys of later versions had their default values.
    before = json.loads(json.dumps({key.path: key.default for key, _ in search.cfg.keys_below()}, default=dict))
    before |= json.loads(file.read_text(encoding="utf-8"))
    changed = [f"{name} was {before.get(name)}, got {facts[name]}" for name in facts if before.get(name) != facts[name]]
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
    if rows:  # PBT may have copied a finished trial and perturbed the values, with no epoch left to train
        values = rows[-1][VALUES]
    evaluated = [row for row in rows if FAILURE not in row]
    # If the values changed during the trial, only evaluations with the last values count.
    reports = [row for row in evaluated if row[VALUES] == values]
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


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read the outcomes of a finished search; [] if the folder contains no finished search."""
    if not (folder / _OUTCOMES).is_file():
        return []
    rows = json.loads((folder / _OUTCOMES).read_text(encoding="utf-8"))
    # Not the recorded path: the folder may have been moved.
    return [Outcome(**row | {"folder": run_dir(folder / row["name"])}) for row in rows]
