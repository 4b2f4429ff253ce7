"""What a trial tells the search after each evaluation, and what it leaves to go on from."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastamp.engine import DefaultTrainer, HookBase
from fastamp.utils.env import peak_memory_mb

Report = Callable[[dict[str, Any], Path], None]


class TuneReportHook(HookBase):
    """Report the scores of each evaluation, and a checkpoint; register it after the trainer's own hooks.

    Args:
        trainer: of the trial.
        report: takes the metrics and the checkpoint file: ``mAP``, ``Rank-1`` and ``score`` (the mean of both), in
            percent, means over the data sets; ``epoch``, those done; ``skipped_steps`` so far; ``peak_memory_mb`` and
            ``images_per_second`` of training since the last report.
    """

    def __init__(self, trainer: DefaultTrainer, report: Report) -> None:
        self.owner, self.report = trainer, report
        self._reported = trainer.eval_hook.results
        self._seconds, self._steps = 0.0, 0

    def before_step(self) -> None:
        self._began = time.perf_counter()

    def after_step(self) -> None:
        self._seconds += time.perf_counter() - self._began
        self._steps += 1

    def after_epoch(self) -> None:
        results = self.owner.eval_hook.results
        if results is self._reported:
            return
        self._reported = results
        cfg, sets = self.owner.cfg, list(results.values())
        means = {name: sum(metrics[key] for metrics in sets) / len(sets) for name, key in
                 (("mAP", "mAP"), ("Rank-1", "Rank-1"), ("score", "metric"))}  # fmt: skip
        images = self._steps * cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUM_STEPS
        metrics = means | {
            "epoch": self.trainer.epoch + 1,
            "skipped_steps": self.trainer.step.skipped_total,
            "peak_memory_mb": peak_memory_mb(next(self.owner.model.parameters()).device),
            "images_per_second": images / max(self._seconds, 1e-9),
        }
        self._seconds, self._steps = 0.0, 0
        self.report(metrics, self.owner.checkpointer.save("model_tune", tag=False))
