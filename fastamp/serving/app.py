"""FastAPI application of the service: routes, access, errors and metrics."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import FormData, Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import fastamp
from fastamp.inference.gallery import MissingItemError, MutableGallery
from fastamp.inference.gallery_store import parse_time
from fastamp.serving import schemas
from fastamp.serving.errors import RequestError, error_body, split_fix
from fastamp.serving.pages import add_pages
from fastamp.serving.requests import (
    check_access,
    discard_body,
    limited,
    models_of,
    number_of,
    read_form,
    texts_of,
    uploads_of,
)
from fastamp.serving.service import Service, item_values
from fastamp.utils.errors import UserError, WriteError

_IMAGES = {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_CONDITIONS = {"camera": _TEXTS, "identity": _TEXTS, "after": {"type": "string"}, "before": {"type": "string"}}
_METADATA = {"type": "string", "description": "JSON list with one object per image: id, name, identity, camera, time"}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
}
_DESCRIPTION = (
    "Features, comparison and search of images with a re-identification model. Images are uploaded as "
    "multipart/form-data in the field `images`. A request is answered with status 429 if the queue is full: "
    "send it again later."
)


def create_app(service: Service, *, api_key: str = "", local: bool = False) -> FastAPI:
    """Create the application.

    Args:
        service: what computes.
        api_key: key that requests must send. Default: "", none.
        local: True if only this machine can reach the service, see ``check_access``.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    def check(request: Request) -> None:
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
    access = [Depends(check)]
    _add_model_routes(app, service, access)
    _add_gallery_routes(app, service, access)
    add_pages(app)

    @app.get("/health", response_model=schemas.Health, tags=["operation"], summary="Whether the service runs")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "pending": service.batcher.pending})

    @app.get("/metrics", dependencies=access, tags=["operation"], summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_error_handlers(app)
    app.add_middleware(_Outer, service=service)
    return app


def _form(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Describe the form of a route for OpenAPI."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"requestBody": {"content": {"multipart/form-data": {"schema": schema}}, "required": True}}


async def _with_form(
    request: Request, service: Service, answer: Callable[[FormData], Awaitable[Any]], *, status: int = 200
) -> Response:
    """Receive the form of a request, unless the queue is full, and answer with the result of ``answer``."""
    try:
        service.batcher.check(1 + service.receiving)
    except RequestError:
        await discard_body(request.scope, request.receive, service.limits)
        raise
    with service.receiving_form():
        form = await read_form(request, service.limits)
    try:
        return JSONResponse(await answer(form), status_code=status)
    finally:
        await form.close()


def _add_model_routes(app: FastAPI, service: Service, access: list[Any]) -> None:
    """Add the routes that need only the model, and the search."""
    most = service.limits.images

    @app.post(
        "/v1/features",
        response_model=schemas.Features,
        dependencies=access,
        tags=["model"],
        summary="Features of images",
        openapi_extra=_form(_IMAGES, "images"),
    )
    async def features(request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            found, _ = await service.features(await uploads_of(form, most=most))
            return {
                "model": service.predictor.config_hash,
                "metric": service.predictor.cfg.TEST.METRIC,
                "features": found.tolist(),
            }

        return await _with_form(request, service, answer)

    @app.post(
        "/v1/compare",
        response_model=schemas.Compared,
        dependencies=access,
        tags=["model"],
        summary="Whether two images show the same identity",
        openapi_extra=_form(_IMAGES, "images"),
    )
    async def compare(request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            (a, b), _ = await service.features(await uploads_of(form, least=2, most=2))
            found = service.predictor.compare_features(a, b)
            return {"metric": found.metric, **service.compared(found.score)}

        return await _with_form(request, service, answer)

    @app.post(
        "/v1/search",
        response_model=schemas.Searched,
        dependencies=access,
        tags=["gallery"],
        summary="The items that are most similar to images",
        openapi_extra=_form({**_IMAGES, "k": {"type": "integer", "default": 10}, **_CONDITIONS}, "images"),
    )
    async def search(request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            service.require_gallery()
            k = number_of(form, "k", min(10, service.limits.results), service.limits.results)
            conditions: dict[str, Any] = {
                name: values
                for name, field in (("cameras", "camera"), ("identities", "identity"))
                if (values := texts_of(form, field))
            }
            for name in ("after", "before"):
                if texts := texts_of(form, name):
                    conditions[name] = parse_time(texts[0])
            found, _ = await service.features(await uploads_of(form, most=most))
            return await service.search(found, k, conditions)

        return await _with_form(request, service, answer)


def _add_gallery_routes(app: FastAPI, service: Service, access: list[Any]) -> None:
    """Add the routes that read and change the gallery."""
    options: dict[str, Any] = {"dependencies": access, "tags": ["gallery"]}

    @app.get("/v1/gallery", response_model=schemas.GalleryInfo, summary="Size and recall of the gallery", **options)
    async def info() -> Response:
        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            return {
                "items": len(gallery),
                "metric": gallery.metric,
                "model": gallery.config_hash,
                "recall": gallery.recall,
            }

        return JSONResponse(await service.in_gallery(read))

    @app.get("/v1/gallery/items", response_model=schemas.Items, summary="Items of the gallery", **options)
    async def items(offset: int = 0, limit: int | None = None) -> Response:
        limit = min(100, service.limits.results) if limit is None else limit
        if offset < 0 or not 1 <= limit <= service.limits.results:
            raise RequestError(
                422, "invalid_field", f"offset must be at least 0, limit from 1 to {service.limits.results}"
            )

        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            return {"total": len(gallery), "items": list(map(item_values, gallery.items[offset : offset + limit]))}

        return JSONResponse(await service.in_gallery(read))

    @app.post(
        "/v1/gallery/items",
        response_model=schemas.Ids,
        status_code=201,
        summary="Add images; the answer follows when they are on the disk",
        openapi_extra=_form({**_IMAGES, "items": _METADATA}, "images"),
        **options,
    )
    async def add(request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            service.require_gallery()
            uploads = await uploads_of(form, most=service.limits.images)
            values = models_of(form, "items", schemas.ItemIn, len(uploads))
            return {"ids": await service.add(uploads, values)}

        return await _with_form(request, service, answer, status=201)

    @app.put(
        "/v1/gallery/items/{item_id:path}",
        response_model=schemas.ItemOut,
        summary="Replace the metadata (items, a list with one object) or the image of an item, or both",
        openapi_extra=_form({**_IMAGES, "items": _METADATA}),
        **options,
    )
    async def update(item_id: str, request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            uploads = await uploads_of(form, least=0, most=1)
            values = models_of(form, "items", schemas.ItemIn, 1)[0] if "items" in form else None
            return await service.update(item_id, values, uploads)

        return await _with_form(request, service, answer)

    @app.get("/v1/gallery/items/{item_id:path}", response_model=schemas.ItemOut, summary="An item", **options)
    async def item(item_id: str) -> Response:
        return JSONResponse(item_values(await service.in_gallery(lambda gallery: gallery.item(item_id))))

    @app.delete("/v1/gallery/items/{item_id:path}", status_code=204, summary="Remove an item", **options)
    async def remove(item_id: str) -> Response:
        await service.in_gallery(lambda gallery: gallery.remove([item_id]))
        return Response(status_code=204)

    @app.get("/v1/gallery/pictures/{item_id:path}", summary="Small picture of an item, a JPEG file", **options)
    async def picture(item_id: str) -> Response:
        content = await service.in_gallery(lambda gallery: gallery.picture(item_id))
        if content is None:
            raise RequestError(404, "no_picture", "there is no such item, or it has no picture")
        return Response(content, media_type="image/jpeg")


def _add_error_handlers(app: FastAPI) -> None:
    """Answer all errors with a structured body; those that are bugs without details, which are logged."""

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return answer_error(error)

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> Response:
        if isinstance(error, WriteError):
            return answer_error(RequestError(503, "gallery_not_written", "the gallery cannot be read or written"))
        status, code = (404, "no_item") if isinstance(error, MissingItemError) else (422, "invalid_value")
        return answer_error(RequestError(status, code, *split_fix(str(error))))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return answer_error(RequestError(422, "invalid_field", f"{first['loc'][-1]}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return JSONResponse(
            error_body("http_error", str(error.detail)), status_code=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body("internal_error", "internal error; see the log of the service"), status_code=500)


def answer_error(error: RequestError) -> Response:
    """Return the answer of an error."""
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


class _Outer:
    """Limit the size of requests, and count and measure them."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, start, status = self._service, time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with service.answering():
                limited_receive = limited(receive, Headers(scope=scope), service.limits)
                await self._app(scope, limited_receive, noting)
        except RequestError as error:  # the declared size
            await answer_error(error)(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            service.metrics.requests.labels(route, scope["method"], status).inc()
            service.metrics.seconds.labels(route).observe(time.perf_counter() - start)
