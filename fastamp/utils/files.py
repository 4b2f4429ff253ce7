"""File names, checks of untrusted paths, closed output streams, and atomic writing."""

import contextlib
import csv
import errno
import hashlib
import io
import os
import select
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fastamp.utils.errors import ConfigError, UserError, writing

FORMAT_KEY = "fastamp_format"
"""Entry of a file that users keep, with the number of its format."""


def expand(path: str | os.PathLike[str]) -> Path:
    """Expand ``~`` and ``~user`` in ``path``; unknown users are not expanded."""
    return Path(os.path.expanduser(path))


def user_cache() -> Path:
    """Return the folder for files that can be made or downloaded again: ``$XDG_CACHE_HOME/fastamp``."""
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fastamp"


def is_zip(path: Path) -> bool:
    """Return True if a file has the end of a zip archive, such as those of ``torch.save``."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # a multi-volume archive
        return False


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path with symbolic links resolved. Unlike ``Path.resolve``, do not raise on link loops."""
    return Path(os.path.realpath(path))


def check_format(version: object, known: object, path: str | os.PathLike[str], error: type[UserError]) -> None:
    """Raise ``error`` if the number of the format of a file is not the one that this version reads and writes."""
    if version != known:
        raise error(
            f"{path} has the format {str(version)[:40]!r}, but this version of fastamp reads the format "
            f"{str(known)!r}.\n"
            "  fix: use the version of fastamp that wrote the file, or a later one"
        )


def check_not_device(path: str | os.PathLike[str]) -> None:
    """Check that ``path`` is a file or folder, because reading a pipe, socket or device (/dev/zero) may never end.

    Raises:
        OSError: if ``path`` is a pipe, socket or device, or does not exist.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "expected a file or folder, got a pipe, socket or device")


def check_outputs(source: str | os.PathLike[str], **files: str | os.PathLike[str] | None) -> None:
    """Check output files before any computation.

    Args:
        source: the input file, which no output may replace.
        files: name of the option, with underscores -> file; None for none.

    Raises:
        ConfigError: if a file is a folder, is in no existing folder, or is the input.
    """
    for option, file in files.items():
        path = expand(file or "")
        if file is not None and (
            path.is_dir() or not path.absolute().parent.is_dir() or real_path(path) == real_path(source)
        ):
            raise ConfigError(
                f"--{option.replace('_', '-')}: expected a new file in an existing folder, got {os.fspath(file)!r}.\n"
                "  fix: create the folder, or choose another file"
            )


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 checksum of a file as 64 hex digits.

    Raises:
        OSError: if the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Leave the context without an error if the program that reads stdout, e.g. ``head``, has exited.

    Raises:
        BrokenPipeError: if a pipe or socket other than stdout was closed.
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
        except BrokenPipeError:  # keep the exit code of the process
            discard_stdout()


def stdout_has_no_reader() -> bool:
    """Return True if stdout is a pipe or socket whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def discard_stdout() -> None:
    """Discard all further output on stdout, e.g. after the program that reads it has exited."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def folder_name(name: str) -> str:
    """Convert a name to a safe, unique folder name: escape separators and leading dots, shorten long names.

    >>> folder_name("Market1501"), folder_name("csv:../mine.csv")
    ('Market1501', 'csv:..%2Fmine.csv')
    """
    quoted = "".join(f"%{ord(character):02X}" if character in "%/\\\0" else character for character in name)
    if quoted.strip(".") == "":
        quoted = quoted.replace(".", "%2E") or "%"
    raw = os.fsencode(quoted)
    if len(raw) <= 200:
        return quoted
    digest = hashlib.blake2b(raw, digest_size=8).hexdigest()
    return f"{digest}-{os.fsdecode(raw[-150:])}"


def write_atomically(path: str | os.PathLike[str], write: Callable[[Any], None]) -> None:
    """Write a file atomically: ``write(file)`` fills a temporary file, which is then renamed to ``path``.

    Raises:
        WriteError: if the file cannot be written. The temporary file is removed; an existing file is left unchanged.
    """
    path = Path(path)
    with writing(path):
        temporary = _write_temporary(path, write)
        try:
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_csv(path: str | os.PathLike[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write rows of values atomically as a CSV file in UTF-8, in which names of files that are not UTF-8 are kept.

    Raises:
        WriteError: see ``write_atomically``.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode("utf-8", "surrogateescape")))


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: temporary files are renamed after all of them are complete.

    An old version of the last file is removed before the others are renamed, so that files of two versions are never
    read together: if the process ends while it renames them, the last file is missing.

    Raises:
        WriteError: if a file cannot be written. Temporary files are removed; unless the error occurs while they are
            renamed, existing files are left unchanged.
    """
    temporary: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            with writing(path):
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                temporary[path] = _write_temporary(path, partial(_write_bytes, content))
        if len(contents) > 1:
            last = list(contents)[-1]
            with writing(last):
                last.unlink(missing_ok=True)
        for path, file in temporary.items():
            with writing(path):
                os.replace(file, path)
                _sync_folder(path.parent)
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)


def _write_bytes(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _write_temporary(path: Path, write: Callable[[Any], None]) -> Path:
    """Write a complete file next to ``path``, with the permissions of a plain ``open``; remove it after an error."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)  # mkstemp creates private files
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        # PyTorch's zip writer raises a RuntimeError while an OSError is handled; raise the OSError.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return Path(temporary)


def _sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a renamed file in it survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # unsupported by some network file systems
            os.fsync(handle)
    finally:
        os.close(handle)
