"""What a trial tells the search after each evaluation, and what it leaves to go on from."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.engine import DefaultTrainer, HookBase
from fastamp.utils.env import peak_memory_mb

Report = Callable[[dict[str, Any], Path], None]
SCORE, EPOCH, ROUND, VALUES = "score", "epoch", "round", "values"
CHECKPOINT = "model_tune"


@dataclass(frozen=True)
class Rounds:
    """Evaluations that count: those after warm-up and freezing, so that no scheduler stops a trial before.

    Attributes:
        period: epochs from one evaluation to the next; the last epoch always has one.
        epochs: of a whole trial.
        grace: epochs after which warm-up and freezing have ended.
    """

    period: int
    epochs: int
    grace: int

    def at(self, epoch: int) -> int:
        """Return how many evaluations that count there are up to an epoch, from 0."""
        first = max(1, math.ceil(min(self.grace, self.epochs) / self.period))
        return max(0, math.ceil(epoch / self.period) - first + 1)

    @property
    def total(self) -> int:
        """Those of a whole trial, 1 at least."""
        return self.at(self.epochs)


class TuneReportHook(HookBase):
    """Report the scores of each evaluation, and a checkpoint; register it after the trainer's own hooks.

    Args:
        trainer: of the trial.
        report: takes the metrics and the checkpoint file: ``mAP``, ``Rank-1`` and ``score`` (the mean of both), in
            percent, means over the data sets; ``epoch``, those done; ``skipped_steps`` so far; ``peak_memory_mb`` and
            ``images_per_second`` of training since the last report.
        keep: checkpoints that are kept, the newest. Above 1 each file has its epoch in its name.
    """

    saves = True

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
        older = [each for each in checkpoints(file.parent) if each.stem < name]
        self.owner.checkpointer.delete(each.stem for each in older[: len(older) + 1 - self.keep])
        self.report(metrics, file)


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints that a trial in a folder can resume from, the oldest first."""
    return sorted(Path(folder).glob(f"{CHECKPOINT}*.pth"))
