"""Limits and API key of the service."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastamp.utils.errors import ConfigError, system_cause

KEY_VARIABLE = "FASTAMP_API_KEY"
_SHORTEST_KEY = 16
_PARTS = {"queue": "images", "total_megabytes": "megabytes"}
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


def _limit(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and of the memory that they may use; each is described by its ``help``.

    Times are in seconds, unless the name ends in ``ms``.
    """

    images: int = _limit(32, "images per request")
    megabytes: float = _limit(32.0, "size of a request in MB")
    megapixels: float = _limit(50.0, "size of an image in megapixels")
    results: int = _limit(1000, "results per image")
    receive_seconds: float = _limit(30.0, "time to receive a request")
    decode_seconds: float = _limit(5.0, "time to decode an image")
    answer_seconds: float = _limit(60.0, "time to answer a request that was received")
    header_seconds: float = _limit(10.0, "time to receive the header of a request")
    idle_seconds: float = _limit(5.0, "time that a connection without a request stays open")
    send_seconds: float = _limit(30.0, "time to send an answer")
    connections: int = _limit(512, "connections; a further one closes the one that is idle for the longest time")
    stop_seconds: float = _limit(60.0, "time to answer the remaining requests after SIGTERM or Ctrl-C")
    total_megabytes: float = _limit(256.0, "size of all unanswered requests; further ones get status 429")
    queue: int = _limit(256, "images that wait or are computed; further requests get status 429")
    batch: int = _limit(32, "images that the model computes at once")
    wait_ms: float = _limit(10.0, "time that the first image of a batch waits for others, in milliseconds")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            part = _PARTS.get(name)  # the limit of one request
            least = vars(self)[part] if part else int(name != "wait_ms")
            if not least <= value < float("inf"):
                reason, fix = (f" (--{part})", f" or decrease --{part}") if part else ("", "")
                raise ConfigError(
                    f"the limit {name} is {value:g}; it must be at least {least:g}{reason}.\n"
                    f"  fix: increase --{name.replace('_', '-')}{fix}"
                )


def read_api_key(file: str | None, host: str, *, no_key: bool = False) -> str:
    """Return the API key from a file or the environment variable FASTAMP_API_KEY; "" if there is none.

    Raises:
        ConfigError: if the file cannot be read, the key is short or has other than visible ASCII characters, or there
            is none although other machines can reach the service.
    """
    if file is None:
        source, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "").strip()
        if not key and (no_key or host in LOCAL_HOSTS):
            return ""
        if not key:
            raise ConfigError(
                f"other machines can reach the service at {host}, but it has no API key.\n"
                f"  fix: set {KEY_VARIABLE} or --api-key-file; --no-api-key starts it without one"
            )
    else:
        try:
            source, key = file, Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            cause = system_cause(error, "it is not text")
            raise ConfigError(
                f"cannot read the API key from {file}: {cause}.\n  fix: correct --api-key-file"
            ) from error
    if len(key) < _SHORTEST_KEY or not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            f"the API key in {source} must have at least {_SHORTEST_KEY} visible ASCII characters, without spaces; "
            f"it has {len(key)} characters.\n"
            '  fix: choose another one, e.g. with python -c "import secrets; print(secrets.token_hex())"'
        )
    return key
