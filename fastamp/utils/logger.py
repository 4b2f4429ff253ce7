"""Logging to the console and to OUTPUT_DIR/log.txt.

``default_setup`` configures both. Without it, trainers and predictors print log lines by ``log_to_console``, unless
the user has configured logging.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from fastamp.utils import comm
from fastamp.utils.errors import writing
from fastamp.utils.progress import ConsoleHandler, in_notebook
from fastamp.utils.terminal_text import sanitize_terminal_text

_FORMAT = "[%(asctime)s %(name)s] %(prefix)s%(message)s"


class _Formatter(logging.Formatter):
    """Formatter with short logger names, a level prefix except for INFO, and escaped control characters."""

    def format(self, record: logging.LogRecord) -> str:
        copied = logging.makeLogRecord(record.__dict__)
        copied.prefix = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        copied.name = record.name.rsplit(".", 1)[-1]
        return sanitize_terminal_text(super().format(copied))


class _LogFile(logging.FileHandler):
    """File handler that drops lines which cannot be written, e.g. on a full disk, and warns once."""

    _warned = False

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = Path(folder).resolve() / _log_name(rank)
        super().__init__(path, encoding="utf-8")
        self.setFormatter(_Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        self.start = path.stat().st_size
        """Size of the lines of earlier runs, in bytes."""

    def end_run(self) -> None:
        """Count the lines so far as lines of an earlier run."""
        self.start = Path(self.baseFilename).stat().st_size

    def move_earlier_lines(self, folder: Path) -> None:
        """Move the lines of earlier runs to a file of the same name in ``folder``."""
        path = Path(self.baseFilename)
        assert self.lock
        with self.lock:
            if not self.start or not path.is_file():
                return
            moved = folder / path.name
            path.rename(moved)
            with moved.open("r+b") as file:
                file.seek(self.start)
                earlier = file.read()
                file.truncate(self.start)
            assert self.stream
            self.stream.close()
            self.stream = self._open()
            self.stream.write(earlier.decode(errors="replace"))
            self.stream.flush()
            self.start = 0

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            print(
                f"{self.baseFilename} cannot be written: {error.strerror}; log lines will be missing", file=sys.stderr
            )

    def close(self) -> None:
        with suppress(OSError):  # buffered lines may fail to be written
            super().close()


class _AutomaticHandler(ConsoleHandler):
    """Console handler that is silent as soon as the logger ``fastamp`` or the root logger has another handler.

    It writes to stderr, and in a notebook to stdout, because notebooks show stderr as an error. The stream is looked up
    for each line, since notebooks and ``contextlib.redirect_stderr`` replace it.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout if in_notebook() else sys.stderr

    def filter(self, record: logging.LogRecord) -> Any:
        return False if _is_configured() else super().filter(record)


def _is_configured() -> bool:
    """Return True if a handler other than ``_AutomaticHandler`` receives the log lines."""
    logger = logging.getLogger("fastamp")
    handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
    return any(not isinstance(handler, (_AutomaticHandler, _LogFile, logging.NullHandler)) for handler in handlers)


def log_to_console() -> None:
    """Print the log lines of fastamp on the main process, unless ``setup_logger`` or the user has configured logging.

    Logging is configured if the logger ``fastamp`` or the root logger has a handler; neither handlers nor levels are
    changed in this case. Can be called repeatedly.
    """
    logger = logging.getLogger("fastamp")
    if _is_configured() or not comm.is_main_process():
        return
    if not any(isinstance(handler, _AutomaticHandler) for handler in logger.handlers):
        handler = _AutomaticHandler()
        handler.setFormatter(_Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


@contextmanager
def log_to_file(output_dir: str | Path, *, rank: int = 0) -> Iterator[None]:
    """Append the log lines of the block to ``log.txt`` in ``output_dir``, unless ``setup_logger`` opened a log file.

    Args:
        output_dir: existing folder.
        rank: rank of this process. Default 0.
    """
    logger = logging.getLogger("fastamp")
    if _log_files():
        yield
        return
    with writing(output_dir):
        file = _LogFile(output_dir, rank)
    logger.addHandler(file)
    try:
        yield
    finally:
        logger.removeHandler(file)
        file.close()


def end_run_in_log() -> None:
    """Separate the log lines so far, of a run that has ended, from those of the next run in this process."""
    for file in _log_files():
        with suppress(OSError):
            file.end_run()


def move_earlier_log(output_dir: Path, folder: Path, *, rank: int, world_size: int) -> None:
    """Move the log lines of an earlier run in ``output_dir`` to ``folder``.

    Rank 0 also moves the log files of ranks that the current run does not have.

    Args:
        output_dir: folder of the run.
        folder: existing folder to move the lines to.
        rank, world_size: rank of this process, and number of processes.
    """
    output_dir = output_dir.resolve()  # the folder of an opened log is resolved too
    names = {_log_name(rank)}
    if rank == 0:
        names |= {path.name for path in output_dir.glob("log.txt.rank*")} - {_log_name(n) for n in range(world_size)}
    for name in names:
        path = output_dir / name
        opened = next((file for file in _log_files() if Path(file.baseFilename) == path), None)
        if opened is not None:
            opened.move_earlier_lines(folder)
        elif path.is_file():
            path.rename(folder / name)


def _log_name(rank: int) -> str:
    return "log.txt" if rank == 0 else f"log.txt.rank{rank}"


def _log_files() -> list[_LogFile]:
    return [handler for handler in logging.getLogger("fastamp").handlers if isinstance(handler, _LogFile)]


def setup_logger(output_dir: str | Path | None = None, *, rank: int = 0) -> logging.Logger:
    """Configure logging to the console (rank 0) and to ``log.txt`` in ``output_dir``.

    Replaces the handlers of earlier calls. Handlers that the user added to the logger ``fastamp`` are kept; if one of
    them is a ``StreamHandler`` of stdout or stderr, it replaces the console. Root handlers no longer receive the lines.

    Args:
        output_dir: folder of the log file, created if missing; None (default) logs only to the console. Ranks above 0
            write ``log.txt.rank<N>``.
        rank: rank of this process. Default 0.

    Returns:
        The logger ``fastamp``.
    """
    logger = logging.getLogger("fastamp")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        if isinstance(handler, (ConsoleHandler, _LogFile)):
            logger.removeHandler(handler)
            handler.close()
    streams = [handler.stream for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    if rank == 0 and sys.stdout not in streams and sys.stderr not in streams:
        console = ConsoleHandler(sys.stdout)
        console.setFormatter(_Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(console)
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        logger.addHandler(_LogFile(output_dir, rank))
    return logger
