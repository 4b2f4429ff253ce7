"""What a name that a user or a file gave may stand for on this machine."""

import errno
import hashlib
import os
import stat
from pathlib import Path


def expand(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with ``~`` and ``~user`` replaced; a user who is not there leaves it as it is."""
    return Path(os.path.expanduser(path))


def check_no_device(path: str | os.PathLike[str]) -> None:
    """Refuse what can be read for ever, or not before somebody writes: pipes, sockets, and devices such as /dev/zero.

    Raises:
        OSError: it is such a thing, or is not there.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


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
