"""Progress bars on terminals and in notebooks (tqdm); other output streams only get log lines."""

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

from fastamp.utils import comm
from fastamp.utils.color import color_level
from fastamp.utils.files import discard_stdout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a notebook without ipywidgets gets text instead of a widget
    from tqdm.auto import tqdm

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Bar(tqdm):
    """tqdm bar without a monitor thread and without a lock between processes."""

    monitor_interval = 0
    _lock = threading.RLock()


def format_duration(seconds: float) -> str:
    """Format seconds as ``1:02:03``, below one hour as ``2:03``."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook; tqdm uses the same criterion."""
    return "ipykernel.zmqshell" in sys.modules


SECONDS_PER_LINE = 30.0
"""Time in seconds after which a line is logged instead of a bar, if the output is not a terminal."""


class ProgressBar:
    """Progress bar, drawn only by the main process, on a terminal or in a notebook; elsewhere a log line at times.

    ``seconds_left`` also works without a drawn bar.

    Args:
        total: total number of steps.
        title: text before the bar.
        done: number of steps already done, e.g. before a resume; these steps are not used to estimate the speed.
            Default 0.
        stream: output stream. Default: stdout.
    """

    def __init__(self, total: int, title: str, *, done: int = 0, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        self.total, self.done = total, done
        self._first = done
        self._start = self._last_line = time.perf_counter()
        self._title = title
        self._bar = _Bar(
            total=total,
            desc=title,
            initial=done,
            file=stream,
            leave=False,
            dynamic_ncols=True,
            disable=not ((stream.isatty() or in_notebook()) and comm.is_main_process()),
        )

    def seconds_left(self) -> float:
        """Return the estimated remaining time at the mean speed; infinity before the first step."""
        steps = self.done - self._first
        if steps == 0:
            return float("inf")
        return (time.perf_counter() - self._start) / steps * (self.total - self.done)

    def update(self, done: int) -> None:
        """Set the number of steps done."""
        self._bar.update(done - self.done)
        self.done = done
        if self._bar.disable and time.perf_counter() - self._last_line >= SECONDS_PER_LINE and comm.is_main_process():
            self.note_line()
            left = format_duration(self.seconds_left())
            logger.info("%s: %d of %d, %s left", self._title, done, self.total, left)

    def note_line(self) -> None:
        """Postpone the next log line, because another line has shown the progress."""
        self._last_line = time.perf_counter()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class ConsoleHandler(logging.StreamHandler):
    """Stream handler that prints log lines above progress bars.

    Records with the attribute ``file_only``, set by ``logger.info(..., extra={"file_only": True})``, are not printed.
    """

    def filter(self, record: logging.LogRecord) -> Any:
        return False if vars(record).get("file_only", False) else super().filter(record)

    def emit(self, record: logging.LogRecord) -> None:
        with _Bar.external_write_mode(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Discard console output if the program that reads it has exited; ``log.txt`` still receives all lines."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            discard_stdout()
        else:
            super().handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; on a terminal, the level and ``fix:`` of warnings and errors are colored."""
        text = super().format(record)
        return color_level(text, record.levelname, self.stream) if record.levelno >= logging.WARNING else text


def track(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """Iterate over ``items`` with a progress bar."""
    bar = ProgressBar(total, title)
    try:
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done)
    finally:
        bar.close()
