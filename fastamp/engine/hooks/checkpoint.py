"""Periodic checkpoints."""

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.strip import strip
from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.layers.lora import adapted_modules
from fastamp.utils import comm

logger = logging.getLogger(__name__)

# Files named in a loaded checkpoint may be deleted, so only names of this form are accepted.
_PERIODIC = re.compile(r"model_(iter_)?\d+")


class PeriodicCheckpointer(HookBase):
    """Save periodic checkpoints, and after the last epoch ``model_final`` and its LoRA adapters, if it has any.

    Checkpoints saved every ``period`` epochs are named ``model_<epoch>``, where epochs count from 0. Checkpoints due
    by ``iterations`` or ``minutes`` are named ``model_iter_<number of iterations>``. If both are due at the end of an
    epoch, only ``model_<epoch>`` is saved. At the end of an epoch, checkpoints are saved after the evaluation. The
    names count from the start of the run, the periods from the start of a stage.

    Args:
        checkpointer: writes the files.
        period: period in epochs.
        iterations: period in iterations; 0 (default) disables these checkpoints.
        minutes: time between checkpoints in minutes, by the clock of rank 0; 0 (default) disables these checkpoints.
        keep: number of newest periodic checkpoints to keep; 0 (default) keeps all.
        clock: returns the current time in seconds. Default ``time.monotonic``.
    """

    priority = Priority.LOW
    every_stage = True

    def __init__(
        self,
        checkpointer: Checkpointer,
        period: int,
        *,
        iterations: int = 0,
        minutes: float = 0.0,
        keep: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpointer = checkpointer
        self.period = period
        self.iterations = iterations
        self.minutes = minutes
        self.keep = keep
        self.clock = clock
        self._names: list[str] = []

    def before_train(self) -> None:
        self._saved_at = self.clock()
        if self.minutes:
            self.trainer.rank_maxima.register(self, self._minutes_passed)

    def after_step(self) -> None:
        ends_epoch = (self.trainer.iter + 1) % self.trainer.iters_per_epoch == 0
        if not ends_epoch and (self._is_due_by_iterations() or self._is_due_by_minutes()):
            self._save(self._iteration_name())

    def after_epoch(self) -> None:
        epochs_done = self.trainer.epoch + 1
        if epochs_done == self.trainer.max_epoch and self.trainer.is_last_stage:
            path = self.checkpointer.save("model_final")
            logger.info("saved %s", path)
            if comm.is_main_process() and any(adapted_modules(self.checkpointer.model)):
                logger.info("saved the LoRA adapters: %s", strip(path, adapters=True).path)
        elif epochs_done % self.period == 0:
            self._save(f"model_{self.trainer.epochs_before + self.trainer.epoch:04d}")
        # Includes the time of the evaluation.
        elif self._is_due_by_iterations() or (self.minutes and comm.any_across_ranks(self._minutes_passed())):
            self._save(self._iteration_name())

    def _iteration_name(self) -> str:
        return f"model_iter_{self.trainer.iters_before + self.trainer.iter + 1:07d}"

    def _is_due_by_iterations(self) -> bool:
        return bool(self.iterations) and (self.trainer.iter + 1) % self.iterations == 0

    def _is_due_by_minutes(self) -> bool:
        """Return True, on all ranks, if ``minutes`` had passed on rank 0 when the verdict of this step was computed."""
        return bool(self.minutes) and bool(self.trainer.rank_maxima.get(self))

    def _minutes_passed(self) -> bool:
        """Return True on rank 0 if ``minutes`` have passed since the last checkpoint; False on other ranks."""
        return comm.is_main_process() and self.clock() - self._saved_at >= 60 * self.minutes

    def _save(self, name: str) -> None:
        # Updated before saving, so that the checkpoint contains its own name.
        self._names = [*(kept for kept in self._names if kept != name), name]
        logger.info("saved %s", self.checkpointer.save(name))
        self._saved_at = self.clock()
        if self.keep:
            self.checkpointer.delete(self._names[: -self.keep])
            self._names = self._names[-self.keep :]

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self._names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._names = [name for name in state["names"] if _PERIODIC.fullmatch(name)]
