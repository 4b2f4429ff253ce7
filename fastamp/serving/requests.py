"""Checks of a request: API key, origin, and the form and its fields."""

import asyncio
import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from fastamp.serving.errors import RequestError
from fastamp.serving.options import LOCAL_HOSTS, Limits

_METADATA_BYTES, _MOST_FIELDS = 2**20, 100


def check_access(headers: Headers, api_key: str, *, local: bool) -> None:
    """Check the API key; if none is required, that no page of another site sent the request.

    Args:
        headers: headers of the request.
        api_key: expected key, as ``X-API-Key`` or ``Authorization: Bearer``; "" if none is required.
        local: True if only this machine can reach the service, which is then addressed by a local name.

    Raises:
        RequestError: with status 400, 401 or 403.
    """
    if api_key:
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        # In constant time. Headers are latin-1, which all keys can be encoded to.
        if not hmac.compare_digest(given.encode("latin-1", "replace"), api_key.encode()):
            raise RequestError(401, "unauthorized", "missing or wrong API key", "send it in the header X-API-Key")
        return
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        addressed, source = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
    except ValueError as error:
        raise RequestError(400, "invalid_header", f"the header Host or Origin is invalid: {error!s:.100}") from error
    # A browser sends requests of pages of other sites without asking the user, but not with a key.
    if origin is not None and source != host:
        raise RequestError(403, "other_origin", f"the request comes from a page of {origin[:100]}")
    if local and addressed not in LOCAL_HOSTS:
        raise RequestError(403, "other_host", f"the request is for {host[:100]}", "use http://127.0.0.1 with the port")


async def read_form(request: Request, limits: Limits, fields: Collection[str]) -> None:
    """Receive the form of a request with ``fields`` within the limits, for ``request.form``.

    Raises:
        RequestError: if it is too large, too slow, incomplete, or no form, or has other fields than ``fields``.
    """
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise RequestError(415, "not_a_form", f"expected multipart/form-data, got {kind[:100] or 'no content type'}")
    try:
        receiving = request.form(max_files=limits.images, max_fields=_MOST_FIELDS, max_part_size=_METADATA_BYTES)
        form = await asyncio.wait_for(receiving, limits.receive_seconds)
    except asyncio.TimeoutError as error:
        message = f"the request was not received in {limits.receive_seconds:g} seconds"
        raise RequestError(408, "too_slow", message) from error
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


def upload_name(file: UploadFile) -> str:
    """Return the name of an uploaded file without folders."""
    name = "".join(filter(str.isprintable, (file.filename or "").replace("\\", "/")))
    return name.rsplit("/", 1)[-1][:200]
