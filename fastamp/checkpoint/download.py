"""Download of large files over HTTPS: continued after an interruption, and never half-written under the final name."""

import http.client
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fastamp.utils.errors import system_cause, writing
from fastamp.utils.version import __version__

logger = logging.getLogger(__name__)

OFFLINE = "HF_HUB_OFFLINE"
"""Environment variable that forbids downloads, that of huggingface_hub; 1, ON, YES or TRUE."""
ATTEMPTS = 4
"""Attempts per address, if the server or the network fails for a time."""
FIRST_WAIT = 1.0
"""Seconds before the second attempt; each later wait is twice as long."""

_TIMEOUT = 30.0  # seconds without data
_MIB = 2**20
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_PAGE = (b"<!doctype", b"<html", b"<?xml")


class DownloadError(Exception):
    """A file cannot be downloaded from an address; the message is one line, for the UserError of the caller."""


class _TemporaryError(DownloadError):
    """The same request may succeed later."""


def is_offline() -> bool:
    """Return True if the environment variable ``OFFLINE`` forbids downloads."""
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


class Downloader:
    """Download one file; the signature of the call is that of pooch's downloaders.

    The bytes are written to ``part``, which remains after a failure of the network, and the next call asks the server
    for the rest. The rest is used only if the server confirms by ETag or Last-Modified that the file is the same.

    Args:
        part: file for the bytes that have arrived. ``.tag`` is appended for the file with the server's tag.
        size: size in bytes; None (default) for that which the server states.
    """

    def __init__(self, part: Path, *, size: int | None = None) -> None:
        self.part, self.size = part, size
        self._tag = part.with_name(f"{part.name}.tag")

    def __call__(self, url: str, output_file: Any, pooch: Any = None) -> None:
        """Download ``url`` to the path ``output_file``.

        Raises:
            DownloadError: if the address cannot be reached, has no such file, or answers with something else.
            WriteError: if the file cannot be written.
        """
        for attempt in range(ATTEMPTS):
            try:
                self._attempt(url)
                break
            except _TemporaryError as error:
                if attempt + 1 == ATTEMPTS:
                    raise
                wait = FIRST_WAIT * 2**attempt
                logger.info("%s; trying again in %g s", error, wait)
                time.sleep(wait)
        with writing(output_file):
            os.replace(self.part, output_file)
        self._tag.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the bytes that have arrived."""
        self.part.unlink(missing_ok=True)
        self._tag.unlink(missing_ok=True)

    def _attempt(self, url: str) -> None:
        tag = self._tag.read_text(encoding="utf-8") if self._tag.is_file() else ""
        done = self.part.stat().st_size if tag and self.part.is_file() else 0
        headers = {"User-Agent": f"fastamp/{__version__}", "Accept-Encoding": "identity"}
        if done:
            headers |= {"Range": f"bytes={done}-", "If-Range": tag}
        with _explained(url), urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as answer:
            if answer.status != 206:
                done = 0
            self._check(url, answer, done)
            self._write(url, answer, done)

    def _check(self, url: str, answer: Any, done: int) -> None:
        """Check the announced type and size of the answer."""
        if answer.headers.get_content_type() == "text/html":
            raise DownloadError(_page(url))
        total = _total(answer, done)
        if total is not None and self.size is not None and total != self.size:
            self.discard()
            raise DownloadError(f"{url}: the file has {total} bytes, but {self.size} were published or recorded")

    def _write(self, url: str, answer: Any, done: int) -> None:
        total = _total(answer, done)
        tag = answer.headers.get("ETag", "")
        tag = (tag if not tag.startswith("W/") else "") or answer.headers.get("Last-Modified", "")
        try:
            with writing(self.part), open(self.part, "r+b" if done else "wb") as file:
                file.seek(done)
                self._tag.write_text(tag, encoding="utf-8")
                done = self._copy(url, answer, file, done, total)
        except DownloadError:
            raise
        except Exception:  # a full disk: what has arrived would only fill it
            self.discard()
            raise
        expected = self.size if total is None else total
        if expected is not None and done != expected:
            raise _TemporaryError(f"{url}: the connection ended after {done} of {expected} bytes")

    def _copy(self, url: str, answer: Any, file: BinaryIO, done: int, total: int | None) -> int:
        from fastamp.utils.progress import ProgressBar  # imports PyTorch

        bar = ProgressBar((total or 0) // _MIB, f"{Path(url).name} (MiB)", done=done // _MIB)
        try:
            while chunk := _read(url, answer):
                if done == 0 and chunk.lstrip()[:9].lower().startswith(_PAGE):
                    self.discard()
                    raise DownloadError(_page(url))
                file.write(chunk)
                done += len(chunk)
                bar.update(done // _MIB)
            file.flush()
            os.fsync(file.fileno())
        finally:
            bar.close()
        return done


def _read(url: str, answer: Any) -> bytes:
    """Read a chunk; a broken connection is not a disk error."""
    try:
        return answer.read(_MIB)
    except (http.client.HTTPException, OSError) as error:
        raise _TemporaryError(f"{url}: the connection broke ({system_cause(error)})") from error


def _total(answer: Any, done: int) -> int | None:
    """Return the size of the whole file; None if the server does not state it."""
    length = answer.headers.get("Content-Length", "")
    return done + int(length) if length.isdecimal() else None


def _page(url: str) -> str:
    return f"{url}: a web page instead of a file: a login, a confirmation, an error or a proxy"


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Convert the errors of a request to DownloadErrors."""
    try:
        yield
    except HTTPError as error:
        kind = _TemporaryError if error.code in _TEMPORARY else DownloadError
        raise kind(f"{url}: status {error.code} ({error.reason})") from error
    except URLError as error:
        reason = error.reason if isinstance(error.reason, Exception) else error
        raise _TemporaryError(f"{url}: {system_cause(reason)}") from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise _TemporaryError(f"{url}: {system_cause(error, type(error).__name__)}") from error
