"""Hook that reports the evaluations and checkpoints of a trial to the search."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.engine import DefaultTrainer, HookBase, Priority
from fastamp.utils.env import peak_memory_mb

Report = Callable[[dict[str, Any], Path], None]
SCORE, EPOCH, ROUND, VALUES = "score", "epoch", "round", "values"
CHECKPOINT = "model_tune"


@dataclass(frozen=True)
class EvalRounds:
    """Evaluations that count for the scheduler.

    Only evaluations after warm-up and freezing count, so that no trial is stopped earlier.

    Attributes:
        period: epochs between evaluations; the last epoch is always evaluated.
        epochs: epochs of a full trial.
        grace: number of epochs until warm-up and freezing have ended.
    """

    period: int
    epochs: int
    grace: int

    def at(self, epoch: int) -> int:
        """Return the number of counted evaluations in the first ``epoch`` epochs."""
        first = max(1, math.ceil(min(self.grace, self.epochs) / self.period))
        return max(0, math.ceil(epoch / self.period) - first + 1)

    @property
    def total(self) -> int:
        """Number of counted evaluations in a full trial, at least 1."""
        return self.at(self.epochs)


class TuneReportHook(HookBase):
    """Report the metrics and a checkpoint after each evaluation.

    Register this hook after the hooks of the trainer.

    Args:
        trainer: trainer of the trial.
        report: function called with the metrics and the checkpoint file. Metrics: ``mAP``, ``Rank-1`` and ``score``
            (their mean), in percent, averaged over the datasets; ``epoch``, the number of finished epochs;
            ``skipped_steps`` so far; ``peak_memory_mb``; ``images_per_second`` of training since the last report.
        keep: number of newest checkpoints to keep; if greater than 1, file names contain the epoch. Default 1.
    """

    priority = Priority.LOW

    def __init__(self, trainer: DefaultTrainer, report: Report, *, keep: int = 1) -> None:
        self.owner, self.report, self.keep = trainer, report, keep
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
                 (("mAP", "mAP"), ("Rank-1", "Rank-1"), (SCORE, "metric"))}  # fmt: skip
        images = self._steps * cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUM_STEPS
        metrics = means | {
            EPOCH: self.trainer.epoch + 1,
            "skipped_steps": self.trainer.step.skipped_total,
            "peak_memory_mb": peak_memory_mb(next(self.owner.model.parameters()).device),
            "images_per_second": images / max(self._seconds, 1e-9),
        }
        self._seconds, self._steps = 0.0, 0
        name = CHECKPOINT if self.keep == 1 else f"{CHECKPOINT}_{metrics[EPOCH]:04d}"
        file = self.owner.checkpointer.save(name, tag=False)
        older = [checkpoint for checkpoint in checkpoints(file.parent) if checkpoint.stem < name]
        self.owner.checkpointer.delete(checkpoint.stem for checkpoint in older[: len(older) + 1 - self.keep])
        self.report(metrics, file)


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints in the folder of a trial, oldest first."""
    return sorted(Path(folder).glob(f"{CHECKPOINT}*.pth"))
