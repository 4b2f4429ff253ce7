"""Set and restore signal handlers. A process stopped by a signal exits with code 128 + the signal number."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that stop a training run: Ctrl-C, termination by a scheduler, and its warning before that."""

Handler = Callable[[int, Any], Any] | signal.Handlers


def set_handler(handler: Handler, numbers: Sequence[int] = STOP_SIGNALS) -> dict[int, Any]:
    """Set a handler for signals. No effect outside the main thread, because Python sets handlers only there.

    Args:
        handler: function called with the signal number and the frame, or ``signal.SIG_IGN`` or ``signal.SIG_DFL``.
        numbers: signal numbers. Default: ``STOP_SIGNALS``.

    Returns:
        Signal number -> previous handler; empty outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


@contextmanager
def handling(handler: Handler, numbers: Sequence[int] = STOP_SIGNALS) -> Iterator[None]:
    """Set a handler for signals inside the context, then restore the previous handlers; see ``set_handler``."""
    former = set_handler(handler, numbers)
    try:
        yield
    finally:
        for number, previous in former.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
