"""Folders that are built aside and renamed when they are done, so that one that exists is whole."""

import shutil
import time
import uuid
from pathlib import Path

# A build folder in which nothing was written for so many seconds belongs to a process that was killed.
_ABANDONED_SECONDS = 120


def aside(folder: Path) -> Path:
    """Return a new, hidden name beside ``folder`` under which to build it; nothing is made."""
    return folder.with_name(f"{_prefix(folder)}{uuid.uuid4().hex}")


def remove_abandoned(folder: Path) -> None:
    """Remove build folders that killed runs left beside ``folder``."""
    for build in folder.parent.glob(f"{_prefix(folder)}*"):
        try:
            last_write = max(path.stat().st_mtime for path in (build, *build.iterdir()))
        except OSError:
            continue
        if time.time() - last_write > _ABANDONED_SECONDS:
            shutil.rmtree(build, ignore_errors=True)


def _prefix(folder: Path) -> str:
    """Return how the names of this folder's build folders begin."""
    return f".{folder.name}.building-"
