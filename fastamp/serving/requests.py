"""Checks of a request: API key, origin, size, images and form fields."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, Headers, UploadFile
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


async def read_form(request: Request, limits: Limits, fields: Collection[str]) -> FormData:
    """Receive a form with ``fields`` within the limits; the caller closes it.

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
    try:
        _check_fields(form, fields)
    except RequestError:
        await form.close()
        raise
    return form


def _check_fields(form: FormData, fields: Collection[str]) -> None:
    """Check that a form has no unknown fields, such as a misspelled condition, and that only images are files."""
    for name, value in form.multi_items():
        if name not in fields:
            fix = f"the fields are {', '.join(fields)}"
            raise RequestError(422, "unknown_field", f"the route has no field {name[:100]!r}", fix)
        if name != "images" and isinstance(value, UploadFile):
            raise RequestError(422, "invalid_field", f"{name}: expected text, got a file")


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


async def uploads_of(form: FormData, *, least: int = 1, most: int) -> list[Upload]:
    """Return the files of the field ``images``.

    Raises:
        RequestError: if there are fewer than ``least`` or more than ``most``, or a value is not a file.
    """
    parts = form.getlist("images")
    files = [part for part in parts if isinstance(part, UploadFile)]
    if len(files) < len(parts):
        raise RequestError(
            422, "not_a_file", "a value of the field images is text, not a file", "upload the content of the image"
        )
    if not least <= len(files) <= most:
        expected = f"{least}" if least == most else f"{least} to {most}"
        raise RequestError(422, "wrong_count", f"expected {expected} files in the field images, got {len(files)}")
    names = ["".join(filter(str.isprintable, (file.filename or "").replace("\\", "/"))) for file in files]
    return [Upload(await file.read(), name.rsplit("/", 1)[-1][:200]) for file, name in zip(files, names, strict=True)]


def number_of(form: FormData, name: str, default: int, largest: int) -> int:
    """Return an integer from 1 to ``largest`` of a form."""
    text = form.get(name, str(default))
    if (
        not isinstance(text, str)
        or not (text.isascii() and text.isdecimal())
        or len(text) > 9
        or not 1 <= int(text) <= largest
    ):
        raise RequestError(422, "invalid_field", f"{name}: expected an integer from 1 to {largest}, got {text!r:.50}")
    return int(text)


def texts_of(form: FormData, name: str) -> list[str]:
    """Return the values of a text field that are not empty."""
    return [text for text in form.getlist(name) if isinstance(text, str) and text]


def models_of(form: FormData, name: str, kind: type[BaseModel], count: int) -> list[Any]:
    """Parse a field with a JSON list of ``count`` objects; without the field, the objects have default values.

    Raises:
        RequestError: if the field is not such a list.
    """
    text = form.get(name)
    if text is None:
        return [kind() for _ in range(count)]
    try:
        values = json.loads(text) if isinstance(text, str) else None
        if not isinstance(values, list) or len(values) != count:
            raise ValueError(f"expected a list of {count} objects, one per image")
        return [kind.model_validate(value) for value in values]
    except (ValidationError, RecursionError, ValueError) as error:
        detail = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            detail = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RequestError(422, "invalid_field", f"{name}: {detail[:300]}") from error
