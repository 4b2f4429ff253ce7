"""Limits and API key of the service."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from fastamp.utils.errors import ConfigError

KEY_VARIABLE = "FASTAMP_API_KEY"
_SHORTEST_KEY = 16
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and of the memory that they may use.

    Attributes:
        images: images per request.
        megabytes: size of a request, in 10**6 bytes.
        megapixels: size of an image, in 10**6 pixels; checked before it is decoded.
        results: results per image of a search.
        receive_seconds: time to receive a request.
        decode_seconds: time to decode an image; the process that decodes it is ended then.
        answer_seconds: time to answer a request after it was received; it then gets status 503.
        header_seconds: time to receive the header of a request.
        idle_seconds: time that a connection without a request stays open.
        send_seconds: time to send an answer to a client that reads slowly.
        connections: connections; the one that is idle for the longest time is closed for a further one.
        stop_seconds: time to answer the remaining requests after SIGTERM.
        total_megabytes: size of all requests that are not yet answered; further ones get status 429.
        queue: images that wait or are computed; further requests get status 429.
        batch: images that the model computes at once.
        wait_ms: time that the first image of a batch waits for further images, in milliseconds.
    """

    images: int = 32
    megabytes: float = 32.0
    megapixels: float = 50.0
    results: int = 1000
    receive_seconds: float = 30.0
    decode_seconds: float = 5.0
    answer_seconds: float = 60.0
    header_seconds: float = 10.0
    idle_seconds: float = 5.0
    send_seconds: float = 30.0
    connections: int = 512
    stop_seconds: float = 60.0
    total_megabytes: float = 256.0
    queue: int = 256
    batch: int = 32
    wait_ms: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = 0 if field.name == "wait_ms" else 1
            if not lowest <= value < float("inf"):
                raise ConfigError(
                    f"the limit {field.name} is {value:g}; it must be at least {lowest}.\n"
                    f"  fix: increase --{field.name.replace('_', '-')}"
                )
        if self.total_megabytes < self.megabytes:
            raise ConfigError(
                f"all requests may have {self.total_megabytes:g} MB, less than the {self.megabytes:g} MB of one.\n"
                "  fix: increase --total-megabytes or decrease --megabytes"
            )
        if self.queue < self.images:
            raise ConfigError(
                f"the queue has {self.queue} places, less than the {self.images} images of one request.\n"
                "  fix: increase --queue or decrease --images"
            )


def read_api_key(file: str | None, host: str, *, no_key: bool = False) -> str:
    """Return the API key from a file or the environment variable FASTAMP_API_KEY; "" if there is none.

    Raises:
        ConfigError: if the file cannot be read, the key is short or has other than visible ASCII characters, or there
            is none although other machines can reach the service.
    """
    key, source = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
    if file is not None:
        source = file
        try:
            key = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or "it is not text"
            raise ConfigError(
                f"cannot read the API key from {file}: {cause}.\n  fix: correct --api-key-file"
            ) from error
    if key or file is not None:
        if len(key) < _SHORTEST_KEY or not all("!" <= character <= "~" for character in key):
            raise ConfigError(
                f"the API key in {source} must have at least {_SHORTEST_KEY} visible ASCII characters, without spaces; "
                f"it has {len(key)} characters.\n"
                '  fix: choose another one, e.g. with python -c "import secrets; print(secrets.token_hex())"'
            )
        return key
    if host not in LOCAL_HOSTS and not no_key:
        raise ConfigError(
            f"other machines can reach the service at {host}, but it has no API key.\n"
            f"  fix: set {KEY_VARIABLE} or --api-key-file; --no-api-key starts it without one"
        )
    return ""
