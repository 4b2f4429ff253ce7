"""Progress with the time left: a tqdm bar on a terminal, nothing elsewhere (the log's lines are the progress there)."""

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from tqdm import tqdm

from fastamp.utils import comm
from fastamp.utils.files import discard_stdout

T = TypeVar("T")


class _Bar(tqdm):
    """A bar that needs no thread and no lock among processes."""

    monitor_interval = 0
    _lock = threading.RLock()


def format_duration(seconds: float) -> str:
    """Return ``1:02:03`` for 3723 seconds, ``2:03`` below an hour."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class ProgressBar:
    """A bar that is drawn only on a terminal, by the main process; it measures the time left everywhere.

    Args:
        total: steps in all.
        title: shown before the bar.
        done: steps done before, e.g. before a resume; they do not count for the time left.
        stream: where to draw; None is stdout.
    """

    def __init__(self, total: int, title: str, *, done: int = 0, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self.total, self.done = total, done
        self._first = done
        self._start = time.perf_counter()
        self._bar = _Bar(
            total=total,
            desc=title,
            initial=done,
            file=stream,
            leave=False,
            dynamic_ncols=True,
            disable=not (stream.isatty() and comm.is_main_process()),
        )

    def seconds_left(self) -> float:
        """Return the expected time to the end at the mean speed so far; infinity before the first step."""
        steps = self.done - self._first
        if steps == 0:
            return float("inf")
        return (time.perf_counter() - self._start) / steps * (self.total - self.done)

    def update(self, done: int) -> None:
        """Set the number of steps done."""
        self._bar.update(done - self.done)
        self.done = done

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class ConsoleHandler(logging.StreamHandler):
    """Prints log lines above the progress bars instead of through them."""

    def emit(self, record: logging.LogRecord) -> None:
        with _Bar.external_write_mode(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Go on without the console where its reader has stopped; ``log.txt`` has the lines."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            discard_stdout()
        else:
            super().handleError(record)


def track(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """Yield ``items`` while a bar on the terminal shows how many of ``total`` are done."""
    bar = ProgressBar(total, title)
    try:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done)
    finally:
        bar.close()
