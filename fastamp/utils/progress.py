"""Progress with the time left: a bar on a terminal, nothing elsewhere (the log's lines are the progress there)."""

import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from fastamp.utils import comm
from fastamp.utils.files import discard_stdout

T = TypeVar("T")

_active: "ProgressBar | None" = None


def format_duration(seconds: float) -> str:
    """Return ``1:02:03`` for 3723 seconds, ``2:03`` below an hour."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class ProgressBar:
    """One line that is redrawn a few times a second while a terminal shows it.

    Args:
        total: steps in all.
        title: shown before the bar.
        done: steps done before, e.g. before a resume; they do not count for the time left.
        stream: where to draw; only when it is a terminal, and by the main process.
    """

    _INTERVAL = 0.2

    def __init__(self, total: int, title: str, *, done: int = 0, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.total, self.title, self.done = total, title, done
        self.note = ""
        self.visible = self.stream.isatty() and comm.is_main_process()
        self._first = done
        self._start = time.perf_counter()
        self._drawn = 0.0

    def seconds_left(self) -> float:
        """Return the expected time to the end at the mean speed so far; infinity before the first step."""
        steps = self.done - self._first
        if steps == 0:
            return float("inf")
        return (time.perf_counter() - self._start) / steps * (self.total - self.done)

    def update(self, done: int, note: str | None = None) -> None:
        """Set the number of steps done, and what stands behind the bar."""
        global _active
        self.done = done
        if note is not None:
            self.note = note
        if not self.visible:
            return
        _active = self
        now = time.perf_counter()
        if now - self._drawn > self._INTERVAL or done == self.total:
            self._drawn = now
            self.draw()

    def draw(self) -> None:
        """Draw the line anew."""
        share = self.done / self.total if self.total else 1.0
        left = self.seconds_left()
        eta = "" if left == float("inf") else f" {format_duration(left)} left"
        head = f"{self.title} {self.done}/{self.total}{eta}"
        width = min(24, max(0, shutil.get_terminal_size().columns - len(head) - len(self.note) - 6))
        bar = f" [{'#' * round(share * width):<{width}}]" if width >= 6 else ""
        line = f"{head}{bar} {self.note}"
        self.stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        self.stream.flush()

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        if self.visible:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def close(self) -> None:
        """Take the line away for good."""
        global _active
        if _active is self:
            self.clear()
            _active = None


class ConsoleHandler(logging.StreamHandler):
    """Prints log lines above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        if _active is not None:
            _active.clear()
        super().emit(record)
        if _active is not None:
            _active.draw()

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
