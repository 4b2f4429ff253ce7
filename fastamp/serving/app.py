"""FastAPI application of the service: access, errors, limits and metrics."""

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import fastamp
from fastamp.serving import schemas
from fastamp.serving.errors import RequestError, user_request_error
from fastamp.serving.pages import add_pages
from fastamp.serving.requests import check_access
from fastamp.serving.routes import add_routes, route_class
from fastamp.serving.service import Service
from fastamp.utils.errors import UserError

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
}
_DESCRIPTION = (
    "Features, comparison and search of images with a re-identification model. Images are uploaded as "
    "multipart/form-data in the field `images`. A request is answered with status 429 if the queue is full: "
    "send it again later."
)
_ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
_METHODS = frozenset(("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"))
_TRIM_SECONDS = 30
_DRAIN_SECONDS = 5


def create_app(service: Service, *, api_key: str = "", local: bool = False, open_metrics: bool = False) -> FastAPI:
    """Create the application.

    Args:
        service: what computes.
        api_key: key that requests must send. Default: "", none.
        local: True if only this machine can reach the service, see ``check_access``.
        open_metrics: if True, ``/metrics`` needs no key. Default: False.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        trimming = asyncio.ensure_future(_return_memory())
        yield
        trimming.cancel()
        await service.stop()

    async def check(request: Request) -> None:  # as a function, it would run in another thread
        check_access(request.headers, api_key, local=local)

    app = FastAPI(
        title="fastamp",
        version=fastamp.__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
    )
    router = APIRouter(prefix="/v1", route_class=route_class(service, check))
    add_routes(router, service)
    app.include_router(router)
    add_pages(app)

    @app.get("/health", response_model=schemas.Health, tags=["operation"], summary="Whether the service runs")
    async def health() -> Response:
        seconds = service.computing_seconds
        stuck = seconds > service.limits.answer_seconds  # requests do not wait that long for their answers
        status, pending = "stuck" if stuck else "ok", service.batcher.pending
        body = schemas.Health(status=status, computing_seconds=round(seconds, 3), pending=pending)
        return JSONResponse(body.model_dump(), status_code=503 if stuck else 200)

    access = [] if open_metrics else [Depends(check)]

    @app.get("/metrics", dependencies=access, tags=["operation"], summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for kind in (RequestError, UserError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(_Outer, service=service)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    """Answer an error with a structured body; a bug, which is logged, without details."""
    answer = _request_error(error)
    headers = error.headers if isinstance(error, HTTPException) else _ERROR_HEADERS.get(answer.status)
    return JSONResponse(answer.body(), status_code=answer.status, headers=headers)


def _request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UserError):
        return user_request_error(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        image_code = "not_a_file" if first["type"] == "value_error" else "wrong_count"
        code = image_code if place.startswith("images") else "invalid_field"
        return RequestError(422, code, f"{place}: {first['msg']}"[:300], "see /docs for the fields of this route")
    if isinstance(error, HTTPException):
        return RequestError(error.status_code, "http_error", str(error.detail))
    return RequestError(500, "internal_error", "internal error; see the log of the service")


async def _return_memory() -> None:
    """Return memory that is not used to the system, every 30 seconds (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(_TRIM_SECONDS)
        await asyncio.to_thread(trim, 0)


class _Outer:
    """Limit the size of requests, and count and measure them.

    An answer that is sent before the request was received ends after the rest of the request, so that the client does
    not read a closed connection instead of the answer.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits, metrics, counts = self._service.limits, self._service.metrics, self._service.counts
        start, status, received, held = time.perf_counter(), 500, 0, 0
        headers, largest = Headers(scope=scope), limits.megabytes * 1e6
        declared = headers.get("content-length", "0")
        more = declared != "0" or "transfer-encoding" in headers
        too_large = RequestError(
            413, "request_too_large", f"the request has more than {limits.megabytes:g} MB", "send fewer images"
        )

        async def receiving() -> Message:
            nonlocal more, received
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            received += len(message.get("body", b""))
            return message

        async def limited() -> Message:
            nonlocal held
            if declared.isdecimal() and int(declared) > largest:
                raise too_large
            message = await receiving()
            counts["held"] += received - held
            held = received
            if received > largest:
                raise too_large
            if counts["held"] > limits.total_megabytes * 1e6:
                text = f"the requests have more than {limits.total_megabytes:g} MB"
                raise RequestError(429, "queue_full", text, "try again later")
            return message

        async def receive_rest() -> None:
            most = received + largest
            while more and received <= most:
                await receiving()

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if more and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(receive_rest(), _DRAIN_SECONDS)
            await send(message)

        counts["received"] += 1
        try:
            await self._app(scope, limited, noting)
        except asyncio.CancelledError:  # the time to stop is over; the server would log a traceback
            pass
        finally:
            counts["answered"] += 1
            counts["held"] -= held
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.requests.labels(route, method, status).inc()
            metrics.seconds.labels(route).observe(time.perf_counter() - start)
