"""The run's log: readable lines on the console and in OUTPUT_DIR/log.txt."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

from fastamp.utils.progress import ConsoleHandler
from fastamp.utils.terminal_text import sanitize_terminal_text

_FORMAT = "[%(asctime)s %(name)s] %(prefix)s%(message)s"


class _Formatter(logging.Formatter):
    """Puts the level before a message only where it is not INFO, shortens names, and lets text give no commands."""

    def format(self, record: logging.LogRecord) -> str:
        copied = logging.makeLogRecord(record.__dict__)
        copied.prefix = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        copied.name = record.name.rsplit(".", 1)[-1]
        return sanitize_terminal_text(super().format(copied))


class _LogFile(logging.FileHandler):
    """Leaves out what cannot be written, e.g. because the disk is full, and says so once."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"{self.baseFilename} cannot be written: {error.strerror}; lines are missing in it", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # of lines that are still to be written
            super().close()


def setup_logger(output_dir: str | Path | None = None, *, rank: int = 0) -> None:
    """Send fastamp's log to the console (rank 0) and to ``log.txt`` in ``output_dir``; may be called again.

    Args:
        output_dir: created when missing; None for the console alone. Ranks above 0 write ``log.txt.rank<N>``.
        rank: this process's rank.
    """
    logger = logging.getLogger("fastamp")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    if rank == 0:
        console = ConsoleHandler(sys.stdout)
        console.setFormatter(_Formatter(_FORMAT, datefmt="%H:%M:%S"))
        logger.addHandler(console)
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        name = "log.txt" if rank == 0 else f"log.txt.rank{rank}"
        file = _LogFile(Path(output_dir) / name, encoding="utf-8")
        file.setFormatter(_Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
        logger.addHandler(file)
