"""One trial of a search: an ordinary training under DefaultTrainer that reports as it goes."""

import gc
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotuner.space import Space
from autotuner.split import register_split
from autotuner.tune_hooks import CHECKPOINT, EPOCH, ROUND, SCORE, VALUES, Report, Rounds, TuneReportHook
from fastamp.config import CfgNode, get_cfg
from fastamp.engine import DefaultTrainer, default_setup
from fastamp.engine.setup import load_parts
from fastamp.utils.errors import UserError

_REPORTS, _LAST_REPORT = "reports.jsonl", "report.json"


@dataclass(frozen=True)
class TrialSettings:
    """What all trials of a search have in common; goes to Ray's processes.

    Attributes:
        config: YAML of the config that values are put into.
        space: what is drawn.
        rounds: see ``Rounds``.
        fraction: of the training identities, held out to judge trials; 0 trains on all and judges on DATASETS.TESTS.
        seed: of that split.
        parts: file that registers parts of the user's own; empty is none.
        here: folder that relative paths start from.
        folder: the search's.
        resumed: whether a trial that begins may be one that was killed, which goes on from what it saved last: that
            is later than what Ray knows of.
    """

    config: str
    space: Space
    rounds: Rounds
    fraction: float
    seed: int
    parts: str
    here: str
    folder: str
    resumed: bool


def run_trial(
    cfg: CfgNode, report: Report, *, checkpoint: str | Path | None = None, with_other_values: bool = False
) -> str:
    """Train by a config, from the beginning or on from a trial's checkpoint.

    Args:
        cfg: of this trial, with its own OUTPUT_DIR.
        report: see ``TuneReportHook``; what it raises ends the trial.
        checkpoint: a file that ``report`` was given, of a trial of the same model; learning rates are those of ``cfg``.
        with_other_values: whether ``cfg`` has other values than the checkpoint's trial: its best is none of this one's.

    Returns:
        The headline of the failure when the config, mixed precision or the training fails in a way that fastamp knows;
        empty when the trial came to its end.
    """
    try:
        default_setup(cfg)
        trainer = DefaultTrainer(cfg)
        trainer.register_hooks([TuneReportHook(trainer, report)])
        if checkpoint is not None:
            trainer.checkpointer.resume(checkpoint)
            if with_other_values:
                trainer.eval_hook.best = None
        else:
            trainer.resume_or_load(resume=False)
        trainer.train()
    except UserError as failure:
        return str(failure).splitlines()[0]
    return ""


def ray_trial(sample: dict[str, Any], settings: TrialSettings) -> None:
    """Run one trial in a process of Ray's, which may have run others before."""
    from ray import tune

    os.chdir(settings.here)
    _forget_former_trials()
    cfg = get_cfg()
    if settings.parts:
        load_parts(settings.parts, cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(settings.config))
    cfg = settings.space.apply(cfg, settings.space.decoded(sample)).clone()
    cfg.defrost()
    if settings.fraction:
        train, validation = register_split(cfg, settings.fraction, settings.seed)
        cfg.DATASETS.NAMES, cfg.DATASETS.TESTS = (train,), (validation,)
        cfg.MODEL.HEADS.NUM_CLASSES = 0
    cfg.OUTPUT_DIR = str(output_dir(settings.folder, tune.get_context().get_trial_id()))
    cfg.freeze()

    values = plain_values(settings.space.decoded(sample))

    def report(metrics: dict[str, Any], file: Path) -> None:
        metrics = metrics | {ROUND: settings.rounds.at(metrics[EPOCH]), VALUES: values}
        _write_down(metrics, cfg.OUTPUT_DIR)
        _tell_ray(metrics, file)

    own, reports = Path(cfg.OUTPUT_DIR) / f"{CHECKPOINT}.pth", read_reports(cfg.OUTPUT_DIR)
    start = tune.get_checkpoint()
    if settings.resumed and own.is_file() and reports:
        _tell_ray(reports[-1], own)
        failure = run_trial(cfg, report, checkpoint=own)
    elif start is not None:
        with start.as_directory() as folder:
            before = json.loads((Path(folder) / _LAST_REPORT).read_text(encoding="utf-8"))
            if before[EPOCH] >= settings.rounds.epochs:
                return  # a trial that takes over another's end has nothing left to train
            failure = run_trial(
                cfg, report, checkpoint=Path(folder) / own.name, with_other_values=before[VALUES] != values
            )
    else:
        failure = run_trial(cfg, report)
    if failure:
        metrics = {SCORE: 0.0, EPOCH: settings.rounds.epochs, ROUND: settings.rounds.total, "failure": failure}
        _write_down(metrics | {VALUES: values}, cfg.OUTPUT_DIR)
        tune.report(metrics)


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are after they were written down."""
    return json.loads(json.dumps(values))


def _tell_ray(metrics: dict[str, Any], file: Path) -> None:
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).write_bytes(file.read_bytes())
        (Path(folder) / _LAST_REPORT).write_text(json.dumps(metrics), encoding="utf-8")
        metrics = {name: value for name, value in metrics.items() if name != VALUES}
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def output_dir(folder: str | Path, trial_id: str) -> Path:
    """Return a trial's OUTPUT_DIR in the folder of its search."""
    return Path(folder) / f"trial_{trial_id}" / "run"


def read_reports(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return what a trial has reported; Ray's own record loses lines of trials that are paused."""
    file = Path(output_dir) / _REPORTS
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _write_down(metrics: dict[str, Any], output_dir: str) -> None:
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _REPORTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _forget_former_trials() -> None:
    """Give back what the trials before this one left in the process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
