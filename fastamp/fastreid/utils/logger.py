"""Logging with FastReID's arguments."""

import logging
from pathlib import Path

from fastamp.fastreid.utils.file_io import PathManager
from fastamp.utils import logger

__all__ = ["PathManager", "setup_logger"]


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
