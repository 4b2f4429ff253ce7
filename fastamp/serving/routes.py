"""Routes of the service: features, comparison, search, and reading and changing the gallery."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse, Response

from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.gallery_store import parse_time
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.serving import schemas
from fastamp.serving.errors import RequestError
from fastamp.serving.requests import in_time, read_form, too_slow, uploads_of
from fastamp.serving.service import Service

Texts = Annotated[list[str] | None, Form()]
Metadata = Annotated[
    str | None, Form(description="JSON list with one object per image: id, name, identity, camera, time")
]
_ITEMS = TypeAdapter(list[schemas.ItemIn])


def add_routes(router: APIRouter, service: Service) -> None:
    """Add the routes that need the model or the gallery to a router of ``route_class``."""
    limits = service.limits
    Images = Annotated[list[UploadFile], File(min_length=1, max_length=limits.images)]
    Pair = Annotated[list[UploadFile], File(min_length=2, max_length=2)]
    OneOrNone = Annotated[list[UploadFile] | None, File(max_length=1)]
    Count = Annotated[int, Form(ge=1, le=limits.results)]
    Limit = Annotated[int, Query(ge=1, le=limits.results)]
    default_k, default_limit = min(10, limits.results), min(100, limits.results)

    @router.post("/features", response_model=schemas.Features, tags=["model"], summary="Features of images")
    async def features(images: Images) -> Response:
        return JSONResponse(await service.features_answer(await uploads_of(images)))

    @router.post("/compare", response_model=schemas.Compared, tags=["model"], summary="Comparison of two images")
    async def compare(images: Pair) -> Response:
        return JSONResponse(await service.compare(await uploads_of(images)))

    @router.post("/search", response_model=schemas.Searched, tags=["gallery"], summary="Items that are most similar")
    async def search(
        images: Images,
        k: Count = default_k,
        camera: Texts = None,
        identity: Texts = None,
        after: Annotated[str, Form()] = "",
        before: Annotated[str, Form()] = "",
    ) -> Response:
        service.require_gallery()
        cameras, identities = ([text for text in texts or () if text] for texts in (camera, identity))
        start, end = (parse_time(text) if text else None for text in (after, before))
        conditions = Conditions(cameras, identities, start, end)
        return JSONResponse(await service.search(await uploads_of(images), k, conditions))

    @router.get("/gallery", response_model=schemas.GalleryInfo, tags=["gallery"], summary="Size and recall")
    async def info() -> Response:
        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            model, recall = gallery.model, gallery.recall
            return {"items": len(gallery), "metric": model.metric, "model": model.config_hash, "recall": recall}

        return JSONResponse(await service.in_gallery(read))

    @router.get("/gallery/items", response_model=schemas.Items, tags=["gallery"], summary="Items of the gallery")
    async def items(offset: Annotated[int, Query(ge=0)] = 0, limit: Limit = default_limit) -> Response:
        def read(gallery: MutableGallery) -> dict[str, Any]:
            gallery.refresh()
            return {"total": len(gallery), "items": [item.texts() for item in gallery.items[offset : offset + limit]]}

        return JSONResponse(await service.in_gallery(read))

    @router.post(
        "/gallery/items",
        response_model=schemas.Ids,
        status_code=201,
        tags=["gallery"],
        summary="Add images; the answer follows when they are on the disk",
    )
    async def add(images: Images, items: Metadata = None) -> Response:
        service.require_gallery()
        values = (
            [schemas.ItemIn.model_validate({}) for _ in images] if items is None else _parse_items(items, len(images))
        )
        return JSONResponse(await service.add(await uploads_of(images), values), status_code=201)

    @router.put(
        "/gallery/items/{item_id:path}",
        response_model=schemas.ItemOut,
        tags=["gallery"],
        summary="Replace the metadata (items, a list with one object) or the image of an item, or both",
    )
    async def update(item_id: str, images: OneOrNone = None, items: Metadata = None) -> Response:
        if not images and items is None:
            raise RequestError(422, "nothing_to_change", "the form has neither images nor items")
        values = None if items is None else _parse_items(items, 1)[0]
        if values is not None and values.id not in (None, item_id):
            raise RequestError(422, "invalid_field", "items: the id of an item cannot be changed", "omit the id")
        return JSONResponse(await service.update(item_id, values, await uploads_of(images or [])))

    @router.get("/gallery/items/{item_id:path}", response_model=schemas.ItemOut, tags=["gallery"], summary="An item")
    async def item(item_id: str) -> Response:
        return JSONResponse((await service.in_gallery(lambda gallery: gallery.item(item_id))).texts())

    @router.delete("/gallery/items/{item_id:path}", status_code=204, tags=["gallery"], summary="Remove an item")
    async def remove(item_id: str) -> Response:
        await service.in_gallery(lambda gallery: gallery.remove([item_id]))
        return Response(status_code=204)

    @router.get("/gallery/pictures/{item_id:path}", tags=["gallery"], summary="Small picture of an item, a JPEG file")
    async def picture(item_id: str) -> Response:
        content = await service.in_gallery(lambda gallery: gallery.picture(item_id))
        if content is None:
            raise RequestError(404, "no_picture", "there is no such item, or it has no picture")
        return Response(content, media_type="image/jpeg")


def _parse_items(text: str, count: int) -> list[schemas.ItemIn]:
    """Parse a JSON list of ``count`` objects."""
    try:
        items = _ITEMS.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestValidationError([{**first, "loc": ("body", "items", *first["loc"])}]) from error
    if len(items) != count:
        raise RequestError(422, "invalid_field", f"items: expected a list of {count} objects, one per image")
    return items


def route_class(service: Service, check: Callable[[Request], Coroutine[Any, Any, None]]) -> type[APIRoute]:
    """Return the class of routes that check the access before they read a form, and whose forms have limits."""

    class Route(APIRoute):
        """Route that receives its form within the limits, unless the queue is full already."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()
            fields = [field.alias for field in self.dependant.body_params]

            async def handle(request: Request) -> Response:
                await check(request)
                if not fields:
                    return await answer(request)
                service.batcher.check(1)
                await read_form(request, service.limits, fields)  # ``answer`` takes and closes it
                return await _unless_abandoned(request, answer(request), service)

            return handle

    return Route


async def _unless_abandoned(request: Request, answer: Coroutine[Any, Any, Response], service: Service) -> Response:
    """Await an answer until the client disconnects or the time is over; it is then cancelled, and frees its places."""

    async def wait_for_the_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(wait_for_the_end())
    try:
        either = asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        await in_time(either, service.limits.answer_seconds, too_slow(service.limits))
        if not answering.done():
            raise RequestError(400, "disconnected", "the client disconnected before the answer")
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait((answering, leaving))
