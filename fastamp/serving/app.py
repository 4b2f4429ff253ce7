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
from fastamp.serving.errors import RequestError, error_body, user_request_error
from fastamp.serving.pages import add_pages
from fastamp.serving.requests import check_access, limited
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


# Pydantic's type of an error in the field ``images`` -> code of the answer.
_IMAGE_ERRORS = {
    "missing": "wrong_count",
    "too_short": "wrong_count",
    "too_long": "wrong_count",
    "value_error": "not_a_file",
}
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
        stuck = service.is_stuck
        body = {
            "status": "stuck" if stuck else "ok",
            "pending": service.batcher.pending,
            "computing_seconds": round(service.computing_seconds, 3),
        }
        return JSONResponse(body, status_code=503 if stuck else 200)

    access = [] if open_metrics else [Depends(check)]

    @app.get("/metrics", dependencies=access, tags=["operation"], summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_error_handlers(app)
    app.add_middleware(_Outer, service=service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer all errors with a structured body; those that are bugs without details, which are logged."""

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> Response:
        return await request_error(_, user_request_error(error))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place, kind = ".".join(map(str, first["loc"][1:])), first["type"]
        code = _IMAGE_ERRORS.get(kind, "invalid_field") if place.startswith("images") else "invalid_field"
        return await request_error(_, RequestError(422, code, f"{place}: {first['msg']}"[:300]))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return JSONResponse(
            error_body("http_error", str(error.detail)), status_code=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body("internal_error", "internal error; see the log of the service"), status_code=500)


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
        service, start, status = self._service, time.perf_counter(), 500
        headers = Headers(scope=scope)
        more = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

        async def receiving() -> Message:
            nonlocal more
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def receive_rest() -> None:
            received = 0
            while more and received <= service.limits.megabytes * 1e6:
                received += len((await receiving()).get("body", b""))

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if more and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(receive_rest(), _DRAIN_SECONDS)
            await send(message)

        try:
            with service.answering() as hold:
                await self._app(scope, limited(receiving, headers, service.limits, hold), noting)
        except asyncio.CancelledError:  # the time to stop is over; the server would log a traceback
            pass
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            service.metrics.requests.labels(route, method, status).inc()
            service.metrics.seconds.labels(route).observe(time.perf_counter() - start)
