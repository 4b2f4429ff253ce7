"""Routes of the service: features, comparison, search, and reading and changing the gallery."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from fastapi.routing import APIRoute
from pydantic import Json
from starlette.responses import Response

from fastamp.inference.similarity import Comparison
from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.gallery_store import parse_time
from fastamp.serving import schemas
from fastamp.serving.errors import RequestError
from fastamp.serving.requests import read_form
from fastamp.serving.service import Service

Texts = Annotated[list[str] | None, Form()]
Metadata = Annotated[
    Json[schemas.ItemsIn] | None,
    Form(description="JSON list with one object per image: id, name, identity, camera, time"),
]


def add_routes(router: APIRouter, service: Service) -> None:
    """Add the routes that need the model or the gallery to a router of ``route_class``."""
    limits, model = service.limits, service.model
    Images = Annotated[list[UploadFile], File(min_length=1, max_length=limits.images)]
    Pair = Annotated[list[UploadFile], File(min_length=2, max_length=2)]
    OneOrNone = Annotated[list[UploadFile] | None, File(max_length=1)]
    Count = Annotated[int, Form(ge=1, le=limits.results)]
    Limit = Annotated[int, Query(ge=1, le=limits.results)]
    default_k, default_limit = min(10, limits.results), min(100, limits.results)

    @router.post("/features", tags=["model"], summary="Features of images")
    async def features(images: Images) -> schemas.Features:
        found, _ = await service.features(images)
        return schemas.Features(model=model.config_hash, metric=model.metric, features=found.tolist())

    @router.post("/compare", response_model=schemas.Compared, tags=["model"], summary="Comparison of two images")
    async def compare(images: Pair) -> Comparison:
        (a, b), _ = await service.features(images)
        return model.compare_features(a, b)

    @router.post("/search", tags=["gallery"], summary="Items that are most similar")
    async def search(
        images: Images,
        k: Count = default_k,
        camera: Texts = None,
        identity: Texts = None,
        after: Annotated[str, Form()] = "",
        before: Annotated[str, Form()] = "",
    ) -> schemas.Searched:
        service.require_gallery()
        cameras, identities = ([text for text in texts or () if text] for texts in (camera, identity))
        start, end = (parse_time(text) if text else None for text in (after, before))
        return await service.search(images, k, Conditions(cameras, identities, start, end))

    @router.get("/gallery", tags=["gallery"], summary="Size and recall")
    async def info() -> schemas.GalleryInfo:
        items, recall = await service.in_gallery(lambda gallery: (len(gallery), gallery.recall))
        return schemas.GalleryInfo(items=items, metric=model.metric, model=model.config_hash, recall=recall)

    @router.get("/gallery/items", tags=["gallery"], summary="Items of the gallery")
    async def items(offset: Annotated[int, Query(ge=0)] = 0, limit: Limit = default_limit) -> schemas.Items:
        rows = slice(offset, offset + limit)
        total, found = await service.in_gallery(lambda gallery: (len(gallery), gallery.items[rows]))
        return schemas.Items(total=total, items=[schemas.ItemOut(**item.texts()) for item in found])

    @router.post(
        "/gallery/items",
        status_code=201,
        tags=["gallery"],
        summary="Add images; the answer follows when they are on the disk",
    )
    async def add(images: Images, items: Metadata = None) -> schemas.Ids:
        service.require_gallery()
        values = [schemas.ItemIn()] * len(images) if items is None else _one_per_image(items, len(images))
        return schemas.Ids(ids=await service.add(images, values))

    @router.put(
        "/gallery/items/{item_id:path}",
        response_model=schemas.ItemOut,
        tags=["gallery"],
        summary="Replace the metadata (items, a list with one object) or the image of an item, or both",
    )
    async def update(item_id: str, images: OneOrNone = None, items: Metadata = None) -> dict[str, str]:
        if not images and items is None:
            raise RequestError(422, "nothing_to_change", "the form has neither images nor items")
        values = None if items is None else _one_per_image(items, 1)[0]
        if values is not None and values.id not in (None, item_id):
            raise RequestError(422, "invalid_field", "items: the id of an item cannot be changed", "omit the id")
        return (await service.update(item_id, values, images or [])).texts()

    @router.get("/gallery/items/{item_id:path}", response_model=schemas.ItemOut, tags=["gallery"], summary="An item")
    async def item(item_id: str) -> dict[str, str]:
        return (await service.in_gallery(lambda gallery: gallery.item(item_id))).texts()

    @router.delete("/gallery/items/{item_id:path}", status_code=204, tags=["gallery"], summary="Remove an item")
    async def remove(item_id: str) -> None:
        await service.in_gallery(lambda gallery: gallery.remove([item_id]))

    @router.get("/gallery/pictures/{item_id:path}", tags=["gallery"], summary="Small picture of an item, a JPEG file")
    async def picture(item_id: str) -> Response:
        content = await service.in_gallery(lambda gallery: gallery.picture(item_id))
        if content is None:
            raise RequestError(404, "no_picture", "there is no such item, or it has no picture")
        return Response(content, media_type="image/jpeg")


def _one_per_image(items: schemas.ItemsIn, count: int) -> list[schemas.ItemIn]:
    if len(items.root) != count:
        raise RequestError(422, "invalid_field", f"items: expected a list of {count} objects, one per image")
    return items.root


def route_class(service: Service, check: Callable[[Request], Coroutine[Any, Any, None]]) -> type[APIRoute]:
    """Return the class of routes that check the access before they read a form, and whose forms have limits."""

    class Route(APIRoute):
        """Route that receives its form within the limits, unless the queue is full already."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer = super().get_route_handler()
            fields = [field.alias for field in self.dependant.body_params]

            async def handle(request: Request) -> Response:
                await check(request)
                if fields:
                    service.batcher.check(1)
                    await read_form(request, service.limits, fields)  # ``answer`` takes and closes it
                return await _unless_abandoned(request, answer(request), service.limits.answer_seconds)

            return handle

    return Route


async def _unless_abandoned(request: Request, answer: Coroutine[Any, Any, Response], seconds: float) -> Response:
    """Await an answer until the client disconnects or the time is over; it is then cancelled, and frees its places."""

    async def wait_for_the_end() -> NoReturn:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise RequestError(400, "disconnected", "the client disconnected before the answer")

    tasks = asyncio.ensure_future(answer), asyncio.ensure_future(wait_for_the_end())
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                return task.result()
        message = f"the request was not answered within {seconds:g} seconds"
        raise RequestError(503, "too_slow", message, "try again later")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
