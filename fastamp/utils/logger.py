"""Logging to the console and to OUTPUT_DIR/log.txt."""

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastamp.utils.progress import ConsoleHandler
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


def setup_logger(
    output_dir: str | Path | None = None, distributed_rank: int = 0, *, rank: int | None = None, **unused: Any
) -> logging.Logger:
    """Configure logging to the console (rank 0) and to ``log.txt`` in ``output_dir``, replacing earlier handlers.

    Args:
        output_dir: folder of the log file, created if missing; None (default) logs only to the console. Ranks above 0
            write ``log.txt.rank<N>``.
        distributed_rank: FastReID's name of ``rank``. Default 0.
        rank: rank of this process. Default: ``distributed_rank``.
        unused: FastReID's arguments ``color``, ``name`` and ``abbrev_name``; ignored.

    Returns:
        The logger ``fastamp``.
    """
    rank = distributed_rank if rank is None else rank
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
    return logger
