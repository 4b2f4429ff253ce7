"""Errors caused by user input: printed without a traceback, exit code 2."""

import difflib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2


class UserError(Exception):
    """Invalid user input. The message states what happened, what was found, and how to fix it.

    Commands print only the message and exit with ``USER_ERROR_EXIT_CODE``. Other exceptions are bugs; their traceback
    is printed.
    """


class ConfigError(UserError):
    """Invalid config file, key, value or component name."""


class DataError(UserError):
    """Dataset that is missing, empty or unsuitable for the config, or that contains an unreadable file."""


class NoMatchError(DataError):
    """No query has a match in the gallery, so metrics are undefined."""


class WeightsError(UserError):
    """Weights file or checkpoint that is missing or damaged, or that does not match the model."""


class HubError(UserError):
    """Model on the Hugging Face Hub that is missing, or that cannot be reached, downloaded or uploaded."""


class TrainingError(UserError):
    """Training cannot continue, or would not change the model."""


class WriteError(ConfigError):
    """A file cannot be written: missing or read-only folder, full disk, or I/O error."""


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert OSErrors inside the context into a WriteError for ``path``."""
    try:
        yield
    except OSError as error:
        free, fix = "", "choose a file in a folder that exists and is writable"
        if error.errno in _DISK_ERRORS:
            free = f" ({shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free / 2**20:.0f} MiB free)"
            fix = "free space on this disk, or choose a folder on another one"
        raise WriteError(f"{os.fspath(path)} cannot be written: {system_cause(error)}{free}\n  fix: {fix}") from error


@contextmanager
def optional_package(purpose: str, extra: str, alternative: str = "") -> Iterator[None]:
    """Convert an ImportError inside the context into a ConfigError.

    Args:
        purpose: what requires which package, e.g. "writing a video requires PyAV".
        extra: extra of fastamp that installs the package.
        alternative: continuation of the fix. Default empty.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'{purpose}, which cannot be imported ({error}).\n  fix: pip install "fastamp[{extra}]"{alternative}'
        ) from error


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Check that ``value`` is one of ``choices``.

    Raises:
        ConfigError: if ``value`` is not a choice; the message gives the key and the choices, and suggests the most
            similar choice.
    """
    if value not in choices:
        raise ConfigError(
            f"{key}: unknown value {value!r}; choices: {', '.join(choices)}.{did_you_mean(value, choices)}"
        )


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'X'?"`` for the choice most similar to ``name``; empty if no choice is similar."""
    by_lower = {str(choice).lower(): str(choice) for choice in choices}
    matches = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.5)
    return f" Did you mean {by_lower[matches[0]]!r}?" if matches else ""


def system_cause(error: Exception, otherwise: str = "") -> str:
    """Return the reason that the system states for an error, else ``otherwise``, or the error's message if it is ""."""
    stated = error.strerror if isinstance(error, OSError) else None
    return stated or otherwise or str(error).strip()


def summarize_error(error: BaseException) -> str:
    """Return ``"type: first line of the message"`` of an error; for a UserError, only the first line of the message."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if text and isinstance(error, UserError) else f"{type(error).__name__}: {text}"
