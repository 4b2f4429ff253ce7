"""Atomic creation of folders: build under a temporary name, then rename."""

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A temporary folder of another machine is removed if nothing was written for this long.
_ABANDONED_SECONDS = 120


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Create a folder next to ``folder``, in which to build its content; it is removed unless the context renames it.

    Temporary folders that killed processes left next to ``folder`` are removed, too.
    """
    remove_abandoned(folder)
    build = temporary_path(folder)
    try:
        build.mkdir(parents=True)
        yield build
    finally:
        shutil.rmtree(build, ignore_errors=True)


def temporary_path(folder: Path) -> Path:
    """Return a unique hidden path next to ``folder``, in which to build its content. The path is not created."""
    return folder.with_name(f"{_prefix(folder)}{_machine()}-{os.getpid()}-{uuid.uuid4().hex}")


def remove_abandoned(folder: Path) -> None:
    """Remove temporary folders that killed processes left next to ``folder``."""
    for build in folder.parent.glob(f"{_prefix(folder)}*"):
        if build.is_symlink() or not build.is_dir():
            continue  # not created by this module
        try:
            last_write = max(path.stat().st_mtime for path in (build, *build.iterdir()))
        except OSError:
            continue
        if _is_of_dead_process(build, folder) or time.time() - last_write > _ABANDONED_SECONDS:
            shutil.rmtree(build, ignore_errors=True)


def _is_of_dead_process(build: Path, folder: Path) -> bool:
    """Return True if the process that created the folder ran on this machine, in this container, and has ended."""
    match = re.fullmatch(r"(.+)-([0-9]+)-[0-9a-f]{32}", build.name.removeprefix(_prefix(folder)))
    if match is None or match[1] != _machine():
        return False
    try:
        os.kill(int(match[2]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _machine() -> str:
    """Identify the machine and its process namespace: containers may share a host name, but not process IDs."""
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _prefix(folder: Path) -> str:
    """Return the prefix of the names of temporary folders for ``folder``."""
    return f".{folder.name}.building-"
