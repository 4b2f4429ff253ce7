"""Download of large files over HTTPS: continued after an interruption, and never half-written under the final name."""

import http.client
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fastamp.utils.errors import system_cause, writing
from fastamp.utils.files import file_sha256
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
_TEMPORARY = (408, 416, 425, 429, 500, 502, 503, 504)
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|!--|\?xml|html|head|meta|title|body|script)", re.IGNORECASE)


class DownloadError(Exception):
    """A file cannot be downloaded from an address; the message is one line, for the UserError of the caller."""


class _TemporaryError(DownloadError):
    """The same request may succeed later."""


def is_offline() -> bool:
    """Return True if the environment variable ``OFFLINE`` forbids downloads."""
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def is_page(content: bytes) -> bool:
    """Return True if the first bytes of a file are those of a web page."""
    return _PAGE.match(content) is not None


def download(url: str, path: Path, *, sha256: str = "", size: int | None = None) -> None:
    """Download a file. Proxies are those of the environment (``https_proxy``).

    The bytes are written to ``.NAME.part`` in the same folder, which remains after a failure of the network: the next
    call asks the server for the rest, and uses it only if the server confirms by ETag or Last-Modified that the file is
    the same. Nothing remains after other failures.

    Args:
        url: address.
        path: path of the file, in an existing folder.
        sha256: first digits of its SHA-256; "" (default) if unknown.
        size: size in bytes; None (default) if unknown.

    Raises:
        DownloadError: if the address cannot be reached, or has no such file or another one; also if ``OFFLINE``
            forbids downloads.
        WriteError: if the file cannot be written.
    """
    if is_offline():
        raise DownloadError(f"{url}: {OFFLINE} forbids downloads")
    part = path.with_name(f".{path.name}.part")
    tag = part.with_suffix(".tag")
    try:
        for attempt in range(ATTEMPTS):
            try:
                _request(url, part, tag, size)
                break
            except _TemporaryError as error:
                if attempt + 1 == ATTEMPTS:
                    raise
                wait = FIRST_WAIT * 2**attempt
                logger.info("%s; trying again in %g s", error, wait)
                time.sleep(wait)
        found = file_sha256(part)
        if not found.startswith(sha256.lower()):
            raise DownloadError(f"{url}: the SHA-256 is {found}, expected {sha256}")
        with writing(path):
            os.replace(part, path)
        tag.unlink(missing_ok=True)
    except (_TemporaryError, KeyboardInterrupt):
        raise  # continued by the next call
    except BaseException:
        part.unlink(missing_ok=True)
        tag.unlink(missing_ok=True)
        raise


def _request(url: str, part: Path, tag: Path, size: int | None) -> None:
    """Request the file, or the bytes after those in ``part``, and append them."""
    known = tag.read_text(encoding="utf-8") if tag.is_file() else ""
    done = part.stat().st_size if known and part.is_file() else 0
    headers = {"User-Agent": f"fastamp/{__version__}", "Accept-Encoding": "identity"}
    if done:
        headers |= {"Range": f"bytes={done}-", "If-Range": known}
    with _explained(url, tag), urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as answer:
        if answer.headers.get_content_type() == "text/html":
            raise DownloadError(_page(url))
        done = done if answer.status == 206 else 0
        length = answer.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else size
        if total is not None and size is not None and total != size:
            raise DownloadError(f"{url}: the file has {total} bytes, expected {size}")
        with writing(part), open(part, "r+b" if done else "wb") as file:
            file.seek(done)
            tag.write_text(_tag(answer), encoding="utf-8")
            done = _copy(url, answer, file, done, total)
    if total is not None and done != total:
        raise _TemporaryError(f"{url}: the connection ended after {done} of {total} bytes")


def _copy(url: str, answer: Any, file: BinaryIO, done: int, total: int | None) -> int:
    """Append the content of an answer to a file, and return the size of the file."""
    from fastamp.utils.progress import ProgressBar  # imports PyTorch

    bar = ProgressBar((total or 0) // _MIB, f"{Path(file.name).name} (MiB)", done=done // _MIB)
    try:
        while chunk := _read(url, answer):
            if done == 0 and is_page(chunk):
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
        chunk: bytes = answer.read(_MIB)
    except (http.client.HTTPException, OSError) as error:
        raise _TemporaryError(f"{url}: the connection broke ({system_cause(error)})") from error
    return chunk


def _tag(answer: Any) -> str:
    """Return the strong ETag of an answer, else Last-Modified, else ""."""
    tag = answer.headers.get("ETag", "")
    return str(tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", ""))


def _page(url: str) -> str:
    return f"{url}: a web page instead of the file, e.g. of a login, a confirmation or a proxy"


@contextmanager
def _explained(url: str, tag: Path) -> Iterator[None]:
    """Convert the errors of a request to DownloadErrors."""
    try:
        yield
    except HTTPError as error:
        if error.code == 416:  # more bytes have arrived than the server has
            tag.unlink(missing_ok=True)
        kind = _TemporaryError if error.code in _TEMPORARY else DownloadError
        raise kind(f"{url}: status {error.code} ({error.reason})") from error
    except URLError as error:
        reason = error.reason if isinstance(error.reason, Exception) else error
        raise _TemporaryError(f"{url}: {system_cause(reason)}") from error
    except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise _TemporaryError(f"{url}: {system_cause(error, type(error).__name__)}") from error
    except ValueError as error:  # not an address
        raise DownloadError(f"{url}: {error}") from error
