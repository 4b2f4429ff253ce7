"""Logging with FastReID's arguments."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fastamp.fastreid.utils.file_io import PathManager
from fastamp.utils import logger

__all__ = ["PathManager", "create_small_table", "log_every_n", "log_every_n_seconds", "log_first_n", "setup_logger"]

_calls: Counter[Hashable] = Counter()
_times: dict[Hashable, float] = {}


def setup_logger(
    output: str | Path | None = None,
    distributed_rank: int = 0,
    *,
    color: bool = True,
    name: str = "fastreid",
    abbrev_name: str | None = None,
) -> logging.Logger:
    """Configure logging to the console and to a file; see ``fastamp.utils.logger.setup_logger``.

    Args:
        output: folder of the log file. Default None: only the console.
        distributed_rank: rank of this process. Default 0.
        color, abbrev_name: ignored.
        name: logger whose lines are handled like those of ``fastamp`` and ``fastreid``. Default ``"fastreid"``.

    Returns:
        The logger ``name``.
    """
    parent = logger.setup_logger(output, rank=distributed_rank)
    if name.partition(".")[0] not in ("fastamp", "fastreid"):
        logging.getLogger(name).parent = parent
    return logging.getLogger(name)


def log_first_n(
    lvl: int, msg: str, n: int = 1, *, name: str | None = None, key: str | tuple[str, ...] = "caller"
) -> None:
    """Log a message in the first ``n`` calls.

    Args:
        lvl: logging level.
        msg: message.
        n: number of calls. Default 1.
        name: name of the logger. Default: the module of the caller, ``"fastreid"`` for a script.
        key: what is counted: calls from the same line (``"caller"``, default), with the same ``"message"``, or both.
    """
    line, module = _caller()
    keys = (key,) if isinstance(key, str) else key
    counted = (line if "caller" in keys else "", msg if "message" in keys else "")
    _calls[counted] += 1
    if _calls[counted] <= n:
        logging.getLogger(name or module).log(lvl, msg)


def log_every_n(lvl: int, msg: str, n: int = 1, *, name: str | None = None) -> None:
    """Log a message in the first and then in each ``n``-th call from the same line; see ``log_first_n``."""
    line, module = _caller()
    _calls[line] += 1
    if n == 1 or _calls[line] % n == 1:
        logging.getLogger(name or module).log(lvl, msg)


def log_every_n_seconds(lvl: int, msg: str, n: float = 1, *, name: str | None = None) -> None:
    """Log a message at most once in ``n`` seconds from the same line; see ``log_first_n``."""
    line, module = _caller()
    now = time.monotonic()
    if now - _times.get(line, -float("inf")) >= n:
        _times[line] = now
        logging.getLogger(name or module).log(lvl, msg)


def _caller() -> tuple[tuple[str, int], str]:
    """Return the file and line that called the function of this module, and the logger of that module."""
    frame = sys._getframe(2)  # noqa: SLF001
    module = frame.f_globals.get("__name__", "")
    return (frame.f_code.co_filename, frame.f_lineno), "fastreid" if module.startswith("__") else module


def create_small_table(small_dict: Mapping[str, Any]) -> str:
    """Format a table whose columns are the entries of a dict."""
    return tabulate([[*small_dict.values()]], headers=[*small_dict], tablefmt="pipe", floatfmt=".3f")
