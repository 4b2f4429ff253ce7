"""Lock on a folder, so that only one process writes to it. The lock is released when the process ends."""

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fastamp.utils.errors import ConfigError, system_cause, writing
from fastamp.utils.terminal_text import sanitize_terminal_text

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

# Time for the former holder to exit, e.g. after it was killed.
_WAIT_SECONDS = 3.0
# Folder -> number of the locking process and open file. A forked process inherits this table but not the lock. Each
# file is opened once, because closing another handle of the same file releases a POSIX lock.
_locks: dict[str, tuple[int, BinaryIO]] = {}


def lock_folder(folder: str | os.PathLike[str], key: str) -> None:
    """Lock a folder; create the folder if it is missing. No effect if this process already holds the lock.

    The lock is a POSIX lock on the file ``.lock`` in the folder. Forked processes do not inherit it, so a worker that
    outlives a killed training process does not keep the folder locked. On a network file system, the lock also applies
    to other machines. If the file system does not support locks, a warning is logged and the folder is not locked.

    Args:
        folder: folder to lock.
        key: config key or argument that sets the folder, for messages, e.g. ``"OUTPUT_DIR"``.

    Raises:
        ConfigError: if another process holds the lock; the message gives the ID, machine and start time of that
            process.
        WriteError: if the folder is not writable.
    """
    name = os.path.realpath(folder)
    if _locks.get(name, (0,))[0] == os.getpid():
        return
    path, deadline = Path(folder) / LOCK_FILE, time.monotonic() + _WAIT_SECONDS
    while True:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                file = _open(path)
            except FileNotFoundError:  # another process has just removed the folder, or it allows no new files
                if time.monotonic() > deadline:
                    raise
                continue
        try:
            locked = _try_lock(file)
        except OSError as error:
            file.close()
            logger.warning(
                "%s %s cannot be locked (%s).\n  fix: make sure that no other process writes to this folder",
                key,
                os.fspath(folder),
                system_cause(error),
            )
            return
        if locked and os.fstat(file.fileno()).st_nlink:
            break
        # If it is locked here, its former holder has removed the file: try again.
        holder_text = "" if locked else _read_holder(file)
        file.close()
        if holder_text and time.monotonic() > deadline:
            raise ConfigError(
                f"{key} {os.fspath(folder)} is locked: another process is writing to it.\n"
                f"  found: {holder_text}\n"
                f"  fix:   choose another {key}, wait until that process ends, or stop it"
            )
        if holder_text:
            time.sleep(0.1)
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv)[:500],
    }
    with suppress(OSError):  # on a full disk the lock is still valid
        file.truncate(0)
        file.write(json.dumps(holder).encode())
        file.flush()
    if not _locks:
        atexit.register(unlock_all)
    _locks[name] = (os.getpid(), file)


@contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which is created and removed again; wait while another process holds it.

    Without support of the file system, nothing is locked.

    Raises:
        WriteError: if the file cannot be created.
    """
    while True:
        with writing(path):
            file = _open(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError:  # the file system does not support locks
            break
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # its former holder has removed it
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        file.close()


def unlock_folder(folder: str | os.PathLike[str]) -> None:
    """Release the lock of a folder and remove the lock file. No effect if this process does not hold the lock."""
    pid, file = _locks.pop(os.path.realpath(folder), (0, None))
    if file is None:
        return
    if pid == os.getpid():
        with suppress(OSError):
            os.unlink(Path(folder) / LOCK_FILE)
    with suppress(OSError):
        file.close()


def unlock_all() -> None:
    """Release all locks that this process holds."""
    for folder in list(_locks):
        unlock_folder(folder)


def describe_lock_holder(folder: str | os.PathLike[str]) -> str:
    """Describe the process that holds the lock of a folder; empty if no other process holds it."""
    path = Path(folder) / LOCK_FILE
    if _locks.get(os.path.realpath(folder), (0,))[0] == os.getpid():
        return ""
    try:
        with open(path, "r+b") as file:
            return "" if _try_lock(file) else _read_holder(file)
    except OSError:
        return ""


def _open(path: Path) -> BinaryIO:
    """Open the lock file for writing.

    Raises:
        OSError: if the file is not writable, or is a symbolic link, which could point to any other file.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")


def _try_lock(file: BinaryIO) -> bool:
    """Try to lock a file; return True on success.

    Raises:
        OSError: if the file system does not support locks.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _read_holder(file: BinaryIO) -> str:
    """Describe the process that holds the lock, from the content of the lock file."""
    try:
        file.seek(0)
        holder = json.loads(file.read(10_000))
        process = f"process {holder['pid']} on {holder['host']}"
        return sanitize_terminal_text(f"{process}, since {holder['since']}: {holder['command']}")
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process (unreadable lock file)"
