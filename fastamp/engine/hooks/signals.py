"""Stop a training on a signal, with its state saved."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine.command_line import TrainingInterrupted
from fastamp.engine.hooks.base import HookBase
from fastamp.utils import comm

logger = logging.getLogger(__name__)


class StopOnSignal(HookBase):
    """After SIGINT, SIGTERM or SIGUSR1, finish the step, save, and end the training; a second signal ends it at once.

    Among several processes the signal of one is everybody's, and the same again within a second is the same one: a
    terminal or a scheduler signals all processes, and the one that started them passes it on as well.

    Args:
        checkpointer: gets ``model_interrupted``.
    """

    saves = True
    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    SAME_WITHIN = 1.0  # seconds

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.received: int | None = None
        self._received_at = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals inside, and give them back to their former handlers afterwards.

        Outside the main thread, where Python cannot handle signals, they stay with whoever has them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        passed_on = comm.is_distributed() or "TORCHELASTIC_RUN_ID" in os.environ
        if self.received is not None:
            if number == self.received and time.monotonic() - self._received_at < self.SAME_WITHIN:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received, self._received_at = number, time.monotonic()
        for each in () if passed_on else self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        logger.warning(
            "%s: stopping after this step, or after the evaluation that follows it; a second one stops at once",
            signal.Signals(number).name,
        )

    def after_step(self) -> None:
        # At the end of an epoch its evaluation and checkpoint come first, so that the saved state is whole.
        if (self.trainer.iter + 1) % self.trainer.iters_per_epoch:
            self._stop_if_asked()

    def after_epoch(self) -> None:
        if self.trainer.iter + 1 < self.trainer.max_iter:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        number = int(comm.largest(self.received or 0))
        if number:
            path = self.checkpointer.save("model_interrupted")
            comm.synchronize()  # when one process has ended, the others are ended
            raise TrainingInterrupted(number, str(path))
