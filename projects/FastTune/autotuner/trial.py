"""One trial of a search: an ordinary training under DefaultTrainer that reports as it goes."""

from pathlib import Path

from autotuner.tune_hooks import Report, TuneReportHook
from fastamp.config import CfgNode
from fastamp.engine import DefaultTrainer, default_setup
from fastamp.utils.errors import TrainingError


def run_trial(cfg: CfgNode, report: Report, *, checkpoint: str | Path | None = None) -> str:
    """Train by a config, from the beginning or on from a trial's checkpoint.

    Args:
        cfg: of this trial, with its own OUTPUT_DIR.
        report: see ``TuneReportHook``; what it raises ends the trial.
        checkpoint: a file that ``report`` was given, of a trial of the same model; learning rates are those of ``cfg``.

    Returns:
        The headline of the failure when mixed precision, or the training, fails in a way that is a property of the
        config; empty when the trial came to its end.
    """
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([TuneReportHook(trainer, report)])
    if checkpoint is not None:
        trainer.checkpointer.resume(checkpoint)
    else:
        trainer.resume_or_load(resume=False)
    try:
        trainer.train()
    except TrainingError as failure:
        return str(failure).splitlines()[0]
    return ""
