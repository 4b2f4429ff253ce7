"""When a run is saved, and how many of its checkpoints are kept."""

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine.hooks.base import HookBase
from fastamp.utils import comm

logger = logging.getLogger(__name__)

# Names come back from a checkpoint, and what they name is deleted: nothing but such files.
_PERIODIC = re.compile(r"model_(iter_)?\d+")


class PeriodicCheckpointer(HookBase):
    """Save ``model_<epoch>`` or ``model_iter_<iterations done>`` from time to time, and ``model_final`` at the end.

    At the end of an epoch that is after its evaluation, and under the epoch's name where that is due.

    Args:
        checkpointer: writes the files.
        period: in epochs.
        iterations: also every so many iterations; 0 is none.
        minutes: also when so many minutes have passed since the last one, by the main process's clock; 0 is none.
        keep: how many of these files are kept, the newest; 0 keeps all.
        clock: returns seconds.
    """

    saves = True

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

    def after_step(self) -> None:
        ends_epoch = (self.trainer.iter + 1) % self.trainer.iters_per_epoch == 0
        if not ends_epoch and self._is_due():
            self._save(f"model_iter_{self.trainer.iter + 1:07d}")

    def after_epoch(self) -> None:
        epochs_done = self.trainer.epoch + 1
        if epochs_done == self.trainer.max_epoch:
            logger.info("saved %s", self.checkpointer.save("model_final"))
        elif epochs_done % self.period == 0:
            self._save(f"model_{self.trainer.epoch:04d}")
        elif self._is_due():
            self._save(f"model_iter_{self.trainer.iter + 1:07d}")

    def _is_due(self) -> bool:
        """Whether iterations or minutes ask for a checkpoint; the same on every rank."""
        if self.iterations and (self.trainer.iter + 1) % self.iterations == 0:
            return True
        if not self.minutes:
            return False
        return comm.broadcast_scalar(self.clock() - self._saved_at) >= 60 * self.minutes

    def _save(self, name: str) -> None:
        # Before it is saved, so that the checkpoint itself is in its own list.
        self._names = [*(each for each in self._names if each != name), name]
        logger.info("saved %s", self.checkpointer.save(name))
        self._saved_at = self.clock()
        if self.keep:
            self.checkpointer.delete(self._names[: -self.keep])
            self._names = self._names[-self.keep :]

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self._names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._names = [name for name in state.get("names", []) if _PERIODIC.fullmatch(name)]
