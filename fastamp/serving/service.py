"""Computations of the service: features, comparisons, searches and changes of the gallery."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from starlette.datastructures import UploadFile
from torch import Tensor

from fastamp.inference.feature_model import FeatureModel
from fastamp.inference.predictor import Predictor
from fastamp.retrieval.gallery import Conditions
from fastamp.retrieval.gallery_store import Item, parse_time
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.retrieval.search import decide, search
from fastamp.serving.batching import Batcher
from fastamp.serving.decoding import Decoder
from fastamp.serving.errors import RequestError, split_fix
from fastamp.serving.metrics import Metrics
from fastamp.serving.options import Limits
from fastamp.serving.requests import upload_name
from fastamp.serving.schemas import ItemIn, Match, QueryResult, Score, Searched
from fastamp.serving.traced import Compute, traced_features
from fastamp.utils.errors import DataError

T = TypeVar("T")


class Service:
    """Model, gallery and queue of the service.

    Args:
        model: checkpoint or exported file; it must not require cameras, views or modalities.
        gallery: gallery of this model. Default: None, only features and comparisons.
        limits: limits of requests.
        pictures: if True, store a small picture of each added image. Default: True.

    Attributes:
        counts: number of requests ``received`` and ``answered``, and bytes ``held`` of those that are not answered yet.

    Raises:
        ConfigError: if the model requires cameras, views or modalities.
    """

    def __init__(
        self, model: FeatureModel, gallery: MutableGallery | None, limits: Limits, *, pictures: bool = True
    ) -> None:
        # Raises an error now instead of at the first request, and loads what the first batch needs.
        example = model.preprocess(torch.zeros(model.transforms.channels, 256, 128, dtype=torch.uint8))
        model.features_of_preprocessed([example])
        self.model, self.gallery, self.limits = model, gallery, limits
        self.metrics = Metrics(lambda: self.batcher.pending, None if gallery is None else lambda: len(gallery))
        self._features: Compute = model.features_of_preprocessed
        self._torch_threads, workers = torch.get_num_threads(), 1
        if isinstance(model, Predictor) and model.device.type == "cpu":
            self._features = traced_features(model, example)
            # The threads of one batch synchronize after each layer, which leaves cores idle; a second batch uses them.
            # The runtime of an exported file is called for one batch at a time, and so is a GPU.
            workers = min(2, self._torch_threads)
        self.batcher = Batcher(self._compute, limits, workers)
        most = min(int(limits.megapixels * 1e6), model.transforms.max_pixels)
        transforms = model.transforms._replace(max_pixels=most)
        self._decoder = Decoder(transforms, limits.decode_seconds, pictures=pictures and gallery is not None)
        self._gallery_thread = ThreadPoolExecutor(1, "gallery")
        self._gallery_call = 0.0  # start of the call that is running
        self._building: asyncio.Future[Any] | None = None
        self.counts: Counter[str] = Counter()

    @property
    def computing_seconds(self) -> float:
        """Time since the start of the oldest batch, or call of the gallery, that is computed; 0 if there is none."""
        running = [*self.batcher.starts, self._gallery_call or time.monotonic()]
        return time.monotonic() - min(running)

    def start(self) -> None:
        """Start to compute, in the running event loop."""
        self._decoder.start()
        self._build_candidates()

    async def stop(self) -> None:
        """Compute what waits, and stop."""
        await self.batcher.stop()
        if self._building is not None:
            await asyncio.wait([self._building])
        self._decoder.close()
        self._gallery_thread.shutdown()
        if self.gallery is not None:
            self.gallery.close()

    async def features(self, files: Sequence[UploadFile]) -> tuple[Tensor, list[bytes | None]]:
        """Compute the features (N, D) of uploaded images, and their pictures if the gallery stores them.

        Raises:
            RequestError: if the queue is full, or an image is invalid.
        """
        with self.batcher.places(len(files)):
            contents = [await file.read() for file in files]
            names = [f"{number} ({upload_name(file)})" for number, file in enumerate(files)]
            try:
                decoded = await asyncio.gather(*map(self._decoder.decode, contents, names))
            except DataError as error:
                message, _ = split_fix(str(error))
                fix = f"send a JPEG, PNG or WebP file of at most {self.limits.megapixels:g} megapixels"
                raise RequestError(422, "invalid_image", message, fix) from error
            try:
                features = await self.batcher.features([image for image, _ in decoded])
            except DataError as error:
                raise RequestError(422, "invalid_image", *split_fix(str(error))) from error
            return features, [picture for _, picture in decoded]

    def _compute(self, images: Sequence[Tensor]) -> Tensor:
        """Compute the features of a batch, with half of PyTorch's threads if two batches are computed."""
        self.metrics.batches.observe(len(images))
        threads = max(1, self._torch_threads // len(self.batcher.starts))
        if torch.get_num_threads() != threads:  # of this thread
            torch.set_num_threads(threads)
        return self._features(images)

    def require_gallery(self) -> MutableGallery:
        """Return the gallery; raise RequestError with status 404 if there is none."""
        if self.gallery is None:
            raise RequestError(404, "no_gallery", "the service has no gallery", "start it with --gallery")
        return self.gallery

    async def in_gallery(self, function: Callable[[MutableGallery], T]) -> T:
        """Call a function with the gallery in its thread, with the changes of other processes.

        A call that has started is completed, also if the client has disconnected.

        Raises:
            RequestError: with status 404 if there is no gallery.
        """
        gallery = self.require_gallery()

        def call() -> T:
            self._gallery_call = time.monotonic()
            try:
                with gallery.reading():
                    return function(gallery)
            finally:
                self._gallery_call = 0.0

        return await asyncio.get_running_loop().run_in_executor(self._gallery_thread, call)

    async def add(self, files: Sequence[UploadFile], values: Sequence[ItemIn]) -> list[str]:
        """Add images to the gallery and return their ids, after they are on the disk."""
        items = [
            _item(value, value.id or uuid.uuid4().hex, upload_name(file))
            for value, file in zip(values, files, strict=True)
        ]
        features, pictures = await self.features(files)
        added = [replace(item, picture=picture) for item, picture in zip(items, pictures, strict=True)]
        await self.in_gallery(lambda gallery: gallery.add(added, features))
        self._build_candidates()
        return [item.id for item in added]

    async def update(self, item_id: str, values: ItemIn | None, files: Sequence[UploadFile]) -> Item:
        """Replace the metadata of an item if ``values`` are given, and its image if there is a file; return it."""
        features, pictures = await self.features(files) if files else (None, [None])

        def change(gallery: MutableGallery) -> Item:
            item = gallery.item(item_id)
            if values is not None:
                item = _item(values, item_id, item.name)
            gallery.update([replace(item, picture=pictures[0])], features)
            return item

        return await self.in_gallery(change)

    async def search(self, files: Sequence[UploadFile], k: int, conditions: Conditions) -> Searched:
        """Search for the nearest items of uploaded images, and decide with the calibration of the model."""
        features, _ = await self.features(files)

        def find(gallery: MutableGallery) -> Searched:
            found = search(features, gallery, k, where=conditions)
            decided, queries = decide(found, self.model.calibration), []
            for query, (rows, scores) in enumerate(zip(found.rows.tolist(), found.scores.tolist(), strict=True)):
                items = [gallery.items[row] for row in rows]
                matches = list(map(self._match, range(1, len(items) + 1), scores, items))
                decision = {} if decided is None else decided.of_query(query)
                queries.append(QueryResult(**decision, found=matches))
            recall = None if conditions else gallery.recall
            return Searched(metric=found.metric, searched=found.searched, recall=recall, queries=queries)

        return await self.in_gallery(find)

    def _match(self, rank: int, score: float, item: Item) -> Match:
        compared = Score.model_validate(self.model.compare_score(score), from_attributes=True)
        texts = item.texts() | {"name": item.name or item.id}
        return Match.model_validate({"rank": rank, **compared.model_dump(), **texts})

    def _build_candidates(self) -> None:
        """Build the approximate index of a large gallery in the background."""
        gallery = self.gallery
        if gallery is not None and gallery.wants_candidates and (self._building is None or self._building.done()):
            self._building = asyncio.ensure_future(asyncio.to_thread(gallery.build_candidates))


def _item(values: ItemIn, item_id: str, name: str) -> Item:
    """Return an item with metadata of a request; ``name`` is used if these have none."""
    time = parse_time(values.time) if values.time else None
    return Item(item_id, name if values.name is None else values.name, values.identity, values.camera, time)
