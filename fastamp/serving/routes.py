"""Routes of the service: features, comparison, search, and reading and changing the gallery."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import FormData
from starlette.responses import JSONResponse, Response

from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.gallery_store import parse_time
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.serving import schemas
from fastamp.serving.errors import RequestError
from fastamp.serving.options import Limits
from fastamp.serving.requests import models_of, number_of, read_form, texts_of, uploads_of
from fastamp.serving.service import Service, in_time

_IMAGES = {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_CONDITIONS = {"camera": _TEXTS, "identity": _TEXTS, "after": {"type": "string"}, "before": {"type": "string"}}
_METADATA = {"type": "string", "description": "JSON list with one object per image: id, name, identity, camera, time"}
_SEARCH: dict[str, Any] = {**_IMAGES, "k": {"type": "integer", "default": 10}, **_CONDITIONS}
_ITEMS: dict[str, Any] = {**_IMAGES, "items": _METADATA}


def _form(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Describe the form of a route for OpenAPI."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"requestBody": {"content": {"multipart/form-data": {"schema": schema}}, "required": True}}


async def _with_form(
    request: Request,
    service: Service,
    fields: Collection[str],
    answer: Callable[[FormData], Coroutine[Any, Any, Any]],
    *,
    status: int = 200,
) -> Response:
    """Receive the form of a request, unless the queue is full already, and answer with the result of ``answer``."""
    service.batcher.check(1)
    form = await read_form(request, service.limits, fields)
    try:
        return JSONResponse(await _unless_abandoned(request, answer(form), service.limits), status_code=status)
    finally:
        await form.close()


async def _unless_abandoned(request: Request, answer: Coroutine[Any, Any, Any], limits: Limits) -> Any:
    """Await an answer until the client disconnects or the time is over; it is then cancelled, and frees its places."""

    async def wait_for_the_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(wait_for_the_end())
    try:
        await in_time(asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED), limits.answer_seconds)
        if not answering.done():
            raise RequestError(400, "disconnected", "the client disconnected before the answer")
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait((answering, leaving))


def add_model_routes(app: FastAPI, service: Service, access: list[Any]) -> None:
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
            features, _ = await service.features(await uploads_of(form, most=most))
            return {
                "model": service.model.config_hash,
                "metric": service.model.metric,
                "features": features.tolist(),
            }

        return await _with_form(request, service, _IMAGES, answer)

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
            comparison = service.model.compare_features(a, b)
            return {"metric": comparison.metric, **service.compared(comparison.score)}

        return await _with_form(request, service, _IMAGES, answer)

    @app.post(
        "/v1/search",
        response_model=schemas.Searched,
        dependencies=access,
        tags=["gallery"],
        summary="The items that are most similar to images",
        openapi_extra=_form(_SEARCH, "images"),
    )
    async def search(request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            service.require_gallery()
            k = number_of(form, "k", min(10, service.limits.results), service.limits.results)
            times = {name: parse_time(texts[0]) for name in ("after", "before") if (texts := texts_of(form, name))}
            conditions = Conditions(texts_of(form, "camera"), texts_of(form, "identity"), **times)
            features, _ = await service.features(await uploads_of(form, most=most))
            return await service.search(features, k, conditions)

        return await _with_form(request, service, _SEARCH, answer)


def add_gallery_routes(app: FastAPI, service: Service, access: list[Any]) -> None:
    """Add the routes that read and change the gallery."""
    options: dict[str, Any] = {"dependencies": access, "tags": ["gallery"]}

    @app.get("/v1/gallery", response_model=schemas.GalleryInfo, summary="Size and recall of the gallery", **options)
    async def info() -> Response:
        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            return {
                "items": len(gallery),
                "metric": gallery.model.metric,
                "model": gallery.model.config_hash,
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
            return {"total": len(gallery), "items": [item.texts() for item in gallery.items[offset : offset + limit]]}

        return JSONResponse(await service.in_gallery(read))

    @app.post(
        "/v1/gallery/items",
        response_model=schemas.Ids,
        status_code=201,
        summary="Add images; the answer follows when they are on the disk",
        openapi_extra=_form(_ITEMS, "images"),
        **options,
    )
    async def add(request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            service.require_gallery()
            uploads = await uploads_of(form, most=service.limits.images)
            values = models_of(form, "items", schemas.ItemIn, len(uploads))
            return {"ids": await service.add(uploads, values)}

        return await _with_form(request, service, _ITEMS, answer, status=201)

    @app.put(
        "/v1/gallery/items/{item_id:path}",
        response_model=schemas.ItemOut,
        summary="Replace the metadata (items, a list with one object) or the image of an item, or both",
        openapi_extra=_form(_ITEMS),
        **options,
    )
    async def update(item_id: str, request: Request) -> Response:
        async def answer(form: FormData) -> dict[str, Any]:
            uploads = await uploads_of(form, least=0, most=1)
            values = models_of(form, "items", schemas.ItemIn, 1)[0] if "items" in form else None
            if not uploads and values is None:
                raise RequestError(422, "nothing_to_change", "the form has neither images nor items")
            if values is not None and values.id not in (None, item_id):
                raise RequestError(422, "invalid_field", "items: the id of an item cannot be changed", "omit the id")
            return await service.update(item_id, values, uploads)

        return await _with_form(request, service, _ITEMS, answer)

    @app.get("/v1/gallery/items/{item_id:path}", response_model=schemas.ItemOut, summary="An item", **options)
    async def item(item_id: str) -> Response:
        return JSONResponse((await service.in_gallery(lambda gallery: gallery.item(item_id))).texts())

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
