"""A lock on a folder into which one process at a time writes; the system releases it when that process ends."""

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fastamp.utils.errors import ConfigError, writing
from fastamp.utils.terminal_text import sanitize_terminal_text

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

# How long a process that is about to end, e.g. because it was killed, may still have the lock.
_WAIT_SECONDS = 3.0
# Folder -> the process that locked it, since a forked one inherits this but not the lock, and the open file. Closing
# any other open file of the same name would release a POSIX lock, so that each is opened once.
_held: dict[str, tuple[int, BinaryIO]] = {}


def lock_folder(folder: str | os.PathLike[str], key: str) -> None:
    """Take the lock of a folder, which is made if it is missing; without effect where this process has it.

    A POSIX lock on the file ``.lock`` in it: not inherited by forked processes (a worker that outlives a killed
    training for a moment does not keep it), and respected by other machines where a network file system supports it.
    Where it does not, a warning is logged and nothing is locked.

    Args:
        folder: the folder.
        key: what named it, for messages, e.g. ``"OUTPUT_DIR"``.

    Raises:
        ConfigError: another process has the lock; names its number, machine and start.
        WriteError: the folder cannot be written to.
    """
    name = os.path.realpath(folder)
    if _held.get(name, (0,))[0] == os.getpid():
        return
    path, deadline = Path(folder) / LOCK_FILE, time.monotonic() + _WAIT_SECONDS
    while True:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = _open(path)
            except FileNotFoundError:  # its former holder has just removed the folder; or no file can be made in it
                if time.monotonic() > deadline:
                    raise
                continue
        try:
            locked = _try_lock(file)
        except OSError as error:
            file.close()
            logger.warning(
                "%s %s cannot be locked (%s): make sure that no other process writes into it",
                key,
                os.fspath(folder),
                error.strerror or error,
            )
            return
        if locked and os.fstat(file.fileno()).st_nlink:
            break
        found = "" if locked else _read_holder(file)  # locked, but removed by its former holder meanwhile: try again
        file.close()
        if found and time.monotonic() > deadline:
            raise ConfigError(
                f"{key} {os.fspath(folder)}: another process writes into it.\n"
                f"  found: {found}\n"
                f"  fix:   choose another {key}, or wait for that process or end it"
            )
        if found:
            time.sleep(0.1)
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv)[:500],
    }
    with suppress(OSError):  # a full disk; the lock holds all the same
        file.truncate(0)
        file.write(json.dumps(holder).encode())
        file.flush()
    if not _held:
        atexit.register(unlock_all)
    _held[name] = (os.getpid(), file)


def unlock_folder(folder: str | os.PathLike[str]) -> None:
    """Release the lock of a folder and remove its file; without effect where this process does not have it."""
    pid, file = _held.pop(os.path.realpath(folder), (0, None))
    if file is None:
        return
    if pid == os.getpid():
        with suppress(OSError):
            os.unlink(Path(folder) / LOCK_FILE)
    with suppress(OSError):
        file.close()


def unlock_all() -> None:
    """Release all locks that this process has, at the end of a command."""
    for folder in list(_held):
        unlock_folder(folder)


def describe_lock_holder(folder: str | os.PathLike[str]) -> str:
    """Return which other process has the lock of a folder; empty if none has."""
    path = Path(folder) / LOCK_FILE
    if _held.get(os.path.realpath(folder), (0,))[0] == os.getpid():
        return ""
    try:
        with open(path, "r+b") as file:
            return "" if _try_lock(file) else _read_holder(file)
    except OSError:
        return ""


def _open(path: Path) -> BinaryIO:
    """Return the lock file, open for writing.

    Raises:
        OSError: it cannot be written, or is a link, by which this process would write elsewhere.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")


def _try_lock(file: BinaryIO) -> bool:
    """Return whether this process has the lock now.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _read_holder(file: BinaryIO) -> str:
    """Return what the lock file says of the process that has the lock."""
    try:
        file.seek(0)
        holder = json.loads(file.read(10_000))
        process = f"process {holder['pid']} on {holder['host']}"
        return sanitize_terminal_text(f"{process}, since {holder['since']}: {holder['command']}")
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that could not say which it is"
