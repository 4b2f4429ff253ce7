"""Signal handlers: the only place that sets them. Exit codes are 128 + the signal's number."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that stop a training: Ctrl-C, a scheduler's end, and a scheduler's warning before that."""

Handler = Callable[[int, Any], Any] | signal.Handlers


def set_handler(handler: Handler, numbers: Sequence[int] = STOP_SIGNALS) -> dict[int, Any]:
    """Handle signals with ``handler`` from now on.

    Python allows that in the main thread alone; in any other, nothing happens.

    Args:
        handler: called with the signal's number and the frame, or ``signal.SIG_IGN`` or ``signal.SIG_DFL``.
        numbers: of the signals.

    Returns:
        Signal -> the former handler, of those that were set.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


@contextmanager
def handling(handler: Handler, numbers: Sequence[int] = STOP_SIGNALS) -> Iterator[None]:
    """Handle signals with ``handler`` inside, and give them back to their former handlers; see ``set_handler``."""
    former = set_handler(handler, numbers)
    try:
        yield
    finally:
        for number, each in former.items():
            signal.signal(number, signal.SIG_DFL if each is None else each)
