"""Checks of a request: API key, origin, size, images and form fields."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from fastamp.serving.errors import RequestError
from fastamp.serving.options import LOCAL_HOSTS, Limits

T = TypeVar("T")
_METADATA_BYTES, _MOST_FIELDS = 2**20, 100


@dataclass(frozen=True)
class Upload:
    """An uploaded image file: its content, and its name without folders."""

    content: bytes
    name: str


def check_access(headers: Headers, api_key: str, *, local: bool) -> None:
    """Check the API key, and that no page of another site sent the request.

    Args:
        headers: headers of the request.
        api_key: expected key, as ``X-API-Key`` or ``Authorization: Bearer``; "" if none is required.
        local: True if only this machine can reach the service, which is then addressed by a local name.

    Raises:
        RequestError: with status 400, 401 or 403.
    """
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    # In constant time. Headers are latin-1, which all keys can be encoded to.
    if api_key and not hmac.compare_digest(given.encode("latin-1", "replace"), api_key.encode()):
        raise RequestError(401, "unauthorized", "missing or wrong API key", "send it in the header X-API-Key")
    host = headers.get("host", "")
    origin = headers.get("origin")
    try:
        addressed, source = urlsplit(f"//{host}").hostname, None if origin is None else urlsplit(origin).netloc
    except ValueError as error:
        raise RequestError(400, "invalid_header", f"the header Host or Origin is invalid: {error!s:.100}") from error
    # A browser sends pages of other sites' requests without asking the user; a key protects from these.
    if origin is not None and not api_key and source != host:
        raise RequestError(403, "other_origin", f"the request comes from a page of {origin[:100]}")
    if local and not api_key and addressed not in LOCAL_HOSTS:
        raise RequestError(403, "other_host", f"the request is for {host[:100]}", "use http://127.0.0.1 with the port")


def limited(receive: Receive, headers: Headers, limits: Limits, hold: Callable[[int], None]) -> Receive:
    """Wrap ``receive`` so that a larger body than the limit is an error with status 413.

    ``hold`` is called with the number of bytes of each part of the body.
    """
    declared, received, largest = headers.get("content-length", ""), 0, limits.megabytes * 1e6
    too_large = RequestError(
        413, "request_too_large", f"the request has more than {limits.megabytes:g} MB", "send fewer images"
    )

    async def counted() -> Message:
        nonlocal received
        if declared.isdecimal() and int(declared) > largest:
            raise too_large
        message = await receive()
        count = len(message.get("body", b""))
        received += count
        if received > largest:
            raise too_large
        hold(count)
        return message

    return counted


async def read_form(request: Request, limits: Limits, fields: Collection[str]) -> None:
    """Receive the form of a request with ``fields`` within the limits, for ``request.form``.

    Raises:
        RequestError: if it is too large, too slow, incomplete, or no form, or has other fields than ``fields``.
    """
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise RequestError(415, "not_a_form", f"expected multipart/form-data, got {kind[:100] or 'no content type'}")
    late = RequestError(408, "too_slow", f"the request was not received in {limits.receive_seconds:g} seconds")
    try:
        receiving = request.form(max_files=limits.images, max_fields=_MOST_FIELDS, max_part_size=_METADATA_BYTES)
        form = await in_time(receiving, limits.receive_seconds, late)
    except ClientDisconnect as error:
        raise RequestError(400, "disconnected", "the client disconnected before it had sent the request") from error
    except HTTPException as error:  # of the parser
        fix = f"send a complete form with at most {limits.images} images, {_MOST_FIELDS} fields and 1 MiB per field"
        raise RequestError(400, "invalid_form", str(error.detail), fix) from error
    except (LookupError, ValueError) as error:  # of the charset
        raise RequestError(400, "invalid_form", f"the form cannot be read: {error!s:.200}", "use UTF-8") from error
    for name in form:
        if name not in fields:
            await form.close()
            fix = f"the fields are {', '.join(fields)}"
            raise RequestError(422, "unknown_field", f"the route has no field {name[:100]!r}", fix)


async def in_time(awaited: Awaitable[T], seconds: float, late: RequestError) -> T:
    """Await something for at most ``seconds``; raise ``late`` after that."""
    try:
        return await asyncio.wait_for(awaited, seconds)
    except asyncio.TimeoutError as error:
        raise late from error


def too_slow(limits: Limits) -> RequestError:
    """Return the error of a request that is not answered in time."""
    message = f"the request was not answered within {limits.answer_seconds:g} seconds"
    return RequestError(503, "too_slow", message, "try again later")


async def uploads_of(files: Sequence[UploadFile]) -> list[Upload]:
    """Return the contents of files."""
    names = ["".join(filter(str.isprintable, (file.filename or "").replace("\\", "/"))) for file in files]
    return [Upload(await file.read(), name.rsplit("/", 1)[-1][:200]) for file, name in zip(files, names, strict=True)]
