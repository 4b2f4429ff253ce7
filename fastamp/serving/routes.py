"""Routes of the service: features, comparison, search, and reading and changing the gallery."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, params
from starlette.datastructures import FormData
from starlette.responses import JSONResponse, Response

from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.gallery_store import parse_time
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.serving import schemas
from fastamp.serving.errors import RequestError
from fastamp.serving.options import Limits
from fastamp.serving.requests import in_time, models_of, number_of, read_form, texts_of, too_slow, uploads_of
from fastamp.serving.service import Service

_IMAGES = {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}}
_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_CONDITIONS = {"camera": _TEXTS, "identity": _TEXTS, "after": {"type": "string"}, "before": {"type": "string"}}
_METADATA = {"type": "string", "description": "JSON list with one object per image: id, name, identity, camera, time"}
_SEARCH: dict[str, Any] = {**_IMAGES, "k": {"type": "integer", "default": 10}, **_CONDITIONS}
_ITEMS: dict[str, Any] = {**_IMAGES, "items": _METADATA}


def _form(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Describe the form of a route for OpenAPI."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    content = {"multipart/form-data": {"schema": schema}}
    return {"openapi_extra": {"requestBody": {"content": content, "required": True}}}


@asynccontextmanager
async def _receiving(request: Request, service: Service, fields: Collection[str]) -> AsyncIterator[FormData]:
    """Receive the form of a request, unless the queue is full already."""
    service.batcher.check(1)
    form = await read_form(request, service.limits, fields)
    try:
        yield form
    finally:
        await form.close()


async def _answer(request: Request, answer: Coroutine[Any, Any, Any], limits: Limits, status: int = 200) -> Response:
    """Await an answer until the client disconnects or the time is over; it is then cancelled, and frees its places."""

    async def wait_for_the_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(wait_for_the_end())
    try:
        either = asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        await in_time(either, limits.answer_seconds, too_slow(limits))
        if not answering.done():
            raise RequestError(400, "disconnected", "the client disconnected before the answer")
        return JSONResponse(answering.result(), status_code=status)
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait((answering, leaving))


def model_routes(service: Service, access: Sequence[params.Depends]) -> APIRouter:
    """Return the routes that need only the model."""
    router, limits = APIRouter(prefix="/v1", dependencies=access, tags=["model"]), service.limits
    form = _form(_IMAGES, "images")

    @router.post("/features", response_model=schemas.Features, summary="Features of images", **form)
    async def features(request: Request) -> Response:
        async with _receiving(request, service, _IMAGES) as form:
            uploads = await uploads_of(form, most=limits.images)
            return await _answer(request, service.features_answer(uploads), limits)

    @router.post("/compare", response_model=schemas.Compared, summary="Whether two images show one identity", **form)
    async def compare(request: Request) -> Response:
        async with _receiving(request, service, _IMAGES) as form:
            uploads = await uploads_of(form, least=2, most=2)
            return await _answer(request, service.compare(uploads), limits)

    return router


def gallery_routes(service: Service, access: Sequence[params.Depends]) -> APIRouter:
    """Return the routes that search, read and change the gallery."""
    router, limits = APIRouter(prefix="/v1", dependencies=access, tags=["gallery"]), service.limits
    default_results = min(100, limits.results)

    @router.post(
        "/search",
        response_model=schemas.Searched,
        summary="The items that are most similar to images",
        **_form(_SEARCH, "images"),
    )
    async def search(request: Request) -> Response:
        async with _receiving(request, service, _SEARCH) as form:
            service.require_gallery()
            k = number_of(form, "k", min(10, limits.results), limits.results)
            times = {name: parse_time(texts[0]) for name in ("after", "before") if (texts := texts_of(form, name))}
            conditions = Conditions(texts_of(form, "camera"), texts_of(form, "identity"), **times)
            uploads = await uploads_of(form, most=limits.images)
            return await _answer(request, service.search(uploads, k, conditions), limits)

    @router.get("/gallery", response_model=schemas.GalleryInfo, summary="Size and recall of the gallery")
    async def info() -> Response:
        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            model = gallery.model
            return {
                "items": len(gallery),
                "metric": model.metric,
                "model": model.config_hash,
                "recall": gallery.recall,
            }

        return JSONResponse(await service.in_gallery(read))

    @router.get("/gallery/items", response_model=schemas.Items, summary="Items of the gallery")
    async def items(
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=limits.results)] = default_results,
    ) -> Response:
        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            return {"total": len(gallery), "items": [item.texts() for item in gallery.items[offset : offset + limit]]}

        return JSONResponse(await service.in_gallery(read))

    @router.post(
        "/gallery/items",
        response_model=schemas.Ids,
        status_code=201,
        summary="Add images; the answer follows when they are on the disk",
        **_form(_ITEMS, "images"),
    )
    async def add(request: Request) -> Response:
        async with _receiving(request, service, _ITEMS) as form:
            service.require_gallery()
            uploads = await uploads_of(form, most=limits.images)
            values = models_of(form, "items", schemas.ItemIn, len(uploads))
            return await _answer(request, service.add(uploads, values), limits, status=201)

    @router.put(
        "/gallery/items/{item_id:path}",
        response_model=schemas.ItemOut,
        summary="Replace the metadata (items, a list with one object) or the image of an item, or both",
        **_form(_ITEMS),
    )
    async def update(item_id: str, request: Request) -> Response:
        async with _receiving(request, service, _ITEMS) as form:
            uploads = await uploads_of(form, least=0, most=1)
            values = models_of(form, "items", schemas.ItemIn, 1)[0] if "items" in form else None
            if not uploads and values is None:
                raise RequestError(422, "nothing_to_change", "the form has neither images nor items")
            if values is not None and values.id not in (None, item_id):
                raise RequestError(422, "invalid_field", "items: the id of an item cannot be changed", "omit the id")
            return await _answer(request, service.update(item_id, values, uploads), limits)

    @router.get("/gallery/items/{item_id:path}", response_model=schemas.ItemOut, summary="An item")
    async def item(item_id: str) -> Response:
        return JSONResponse((await service.in_gallery(lambda gallery: gallery.item(item_id))).texts())

    @router.delete("/gallery/items/{item_id:path}", status_code=204, summary="Remove an item")
    async def remove(item_id: str) -> Response:
        await service.in_gallery(lambda gallery: gallery.remove([item_id]))
        return Response(status_code=204)

    @router.get("/gallery/pictures/{item_id:path}", summary="Small picture of an item, a JPEG file")
    async def picture(item_id: str) -> Response:
        content = await service.in_gallery(lambda gallery: gallery.picture(item_id))
        if content is None:
            raise RequestError(404, "no_picture", "there is no such item, or it has no picture")
        return Response(content, media_type="image/jpeg")

    return router
