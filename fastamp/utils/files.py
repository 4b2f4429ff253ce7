"""Names of files that a user or a file gave, and files written whole or not at all."""

import contextlib
import errno
import hashlib
import os
import select
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastamp.utils.errors import writing
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "check_no_device": "fastamp.utils.files.check_not_device",
        "closed_stdout_allowed": "fastamp.utils.files.ignore_closed_stdout",
    },
)


def expand(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with ``~`` and ``~user`` replaced; a user who is not there leaves it as it is."""
    return Path(os.path.expanduser(path))


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without links; of links that lead back to themselves, where they begin.

    ``Path.resolve`` raises RuntimeError for the latter.
    """
    return Path(os.path.realpath(path))


def check_not_device(path: str | os.PathLike[str]) -> None:
    """Refuse what can be read for ever, or not before somebody writes: pipes, sockets, and devices such as /dev/zero.

    Raises:
        OSError: it is such a thing, or is not there.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


@contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Continue where the reader of stdout, e.g. ``head``, has stopped reading before all was printed.

    Raises:
        BrokenPipeError: of another pipe or socket.
    """
    try:
        yield
    except BrokenPipeError:
        if not stdout_has_no_reader():
            raise
        discard_stdout()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # what ends the process otherwise, e.g. its exit code, stays
            discard_stdout()


def stdout_has_no_reader() -> bool:
    """Return whether stdout is a pipe or a socket whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard_stdout() -> None:
    """Discard further output on stdout after its reader has closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def folder_name(name: str) -> str:
    """Return ``name`` as that of one folder: what could lead elsewhere, or be too long, is replaced, each other's way.

    >>> folder_name("Market1501"), folder_name("csv:../mine.csv")
    ('Market1501', 'csv:..%2Fmine.csv')
    """
    quoted = "".join(f"%{ord(each):02X}" if each in "%/\\\0" else each for each in name)
    if quoted.strip(".") == "":
        quoted = quoted.replace(".", "%2E") or "%"
    raw = os.fsencode(quoted)
    if len(raw) <= 200:
        return quoted
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return f"{digest}-{os.fsdecode(raw[-150:])}"


def write_atomically(path: str | os.PathLike[str], write: Callable[[Any], None]) -> None:
    """Let ``write(file)`` fill a temporary neighbour of ``path``, then rename it: readers see all of it or nothing.

    Raises:
        WriteError: it cannot be written; nothing is left behind, and what ``path`` was before is still there.
    """
    path = Path(path)
    with writing(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes files private to the user; give it what a plain open() would have.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException as error:
            Path(temporary).unlink(missing_ok=True)
            # PyTorch's writer complains about its place in the file, while the disk's error is handled.
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _sync_folder(folder: Path) -> None:
    """Write down the folder itself, so that a power failure cannot take back the renaming of a file in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and the file is whole all the same
            os.fsync(handle)
    finally:
        os.close(handle)
