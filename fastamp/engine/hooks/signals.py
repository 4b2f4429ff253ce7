"""Checkpoint and stop on a signal."""

import logging
import os
import signal
import time
from contextlib import AbstractContextManager
from types import FrameType

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.utils import comm
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.signals import STOP_SIGNALS, handling, set_handler

logger = logging.getLogger(__name__)


class StopOnSignal(HookBase):
    """After SIGINT, SIGTERM or SIGUSR1, finish the step, save a checkpoint and stop the training.

    With several processes, a signal to one process stops all processes in the same iteration. The processes agree
    on the stop when they agree on whether to apply a step; a signal that arrives later takes effect one step later.

    A second signal stops the process immediately. A repetition of the same signal within ``SAME_WITHIN`` seconds is
    ignored, because a process may receive a signal twice: from the terminal or scheduler, and forwarded by the parent
    process.

    Args:
        checkpointer: saves ``model_interrupted``.
    """

    priority = Priority.LOW
    every_stage = True
    SIGNALS = STOP_SIGNALS
    SAME_WITHIN = 1.0  # seconds

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.received: int | None = None
        self._received_at = 0.0

    def watching(self) -> AbstractContextManager[None]:
        """Return a context manager that handles the signals and restores the previous handlers on exit.

        The context has no effect outside the main thread, because Python can install signal handlers only there.
        """
        return handling(self._receive, self.SIGNALS)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        passed_on = comm.is_distributed() or "TORCHELASTIC_RUN_ID" in os.environ
        if self.received is not None:
            if number == self.received and time.monotonic() - self._received_at < self.SAME_WITHIN:
                return
            set_handler(signal.SIG_DFL, [number])
            os.kill(os.getpid(), number)
            return
        self.received, self._received_at = number, time.monotonic()
        if not passed_on:
            set_handler(signal.SIG_DFL, self.SIGNALS)
        logger.warning(
            "%s: stopping after this step, or after the evaluation at the end of the epoch; a second signal stops "
            "immediately",
            signal.Signals(number).name,
        )

    def before_train(self) -> None:
        self.trainer.rank_maxima.register(self, self._number)

    def after_step(self) -> None:
        # At the end of an epoch, stop after the evaluation and the checkpoint, so that the saved state includes them.
        if (self.trainer.iter + 1) % self.trainer.iters_per_epoch:
            self._stop_if(self.trainer.rank_maxima.get(self))

    def after_epoch(self) -> None:
        if self.trainer.iter + 1 < self.trainer.max_iter or not self.trainer.is_last_stage:
            self._stop_if(comm.max_over_ranks(self._number()))  # includes signals received during the evaluation

    def _number(self) -> int:
        return self.received or 0

    def _stop_if(self, number: float) -> None:
        if number:
            path = self.checkpointer.save("model_interrupted")
            comm.synchronize()  # the exit of one process ends the others
            raise TrainingInterrupted(int(number), str(path))
