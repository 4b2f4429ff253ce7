"""What a name that a user or a file gave may stand for on this machine."""

import errno
import hashlib
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def expand(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with ``~`` and ``~user`` replaced; a user who is not there leaves it as it is."""
    return Path(os.path.expanduser(path))


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without links; of links that lead back to themselves, where they begin.

    ``Path.resolve`` raises RuntimeError for the latter.
    """
    return Path(os.path.realpath(path))


def check_no_device(path: str | os.PathLike[str]) -> None:
    """Refuse what can be read for ever, or not before somebody writes: pipes, sockets, and devices such as /dev/zero.

    Raises:
        OSError: it is such a thing, or is not there.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


@contextmanager
def closed_stdout_allowed() -> Iterator[None]:
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
