"""Errors that a user can act on: one clear message, exit code 2, no traceback."""

import difflib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """The user's input was wrong: what happened, what was found, and what to change.

    Command lines print the message alone and exit with ``USER_ERROR_EXIT_CODE``; every other
    exception is a bug of fastamp's and keeps its traceback.
    """


class ConfigError(UserError):
    """A config file, a key, a value or a component name is wrong."""


class DataError(UserError):
    """A data set is missing, empty, infeasible or has a file that cannot be read."""


class NoMatchError(DataError):
    """No query has a match in the gallery, so that there is nothing to measure."""


class WeightsError(UserError):
    """A weights file or checkpoint is missing, damaged, or belongs to another model."""


class TrainingError(UserError):
    """Training cannot go on or would learn nothing; the message has the cause and the cure."""


class WriteError(ConfigError):
    """A file cannot be written: its folder is missing or read-only, or the disk is full or broken."""


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise WriteError where what is inside cannot write to ``path``."""
    try:
        yield
    except OSError as error:
        free = ""
        if error.errno in _DISK_ERRORS:
            free = f" ({shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free / 2**20:.0f} MiB are free there)"
        raise WriteError(f"{os.fspath(path)} cannot be written: {error.strerror or error}{free}") from error


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``, in a message that names the key and the nearest one."""
    if value not in choices:
        raise ConfigError(f"{key}: {value!r}; choices: {', '.join(choices)}.{did_you_mean(value, choices)}")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'X'?"`` for the choice nearest to ``name``, or an empty string."""
    by_lower = {str(choice).lower(): str(choice) for choice in choices}
    near = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def summarize_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message; for a UserError only that line."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if text and isinstance(error, UserError) else f"{type(error).__name__}: {text}"
