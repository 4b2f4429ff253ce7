"""Dynamic batching: images of concurrent requests are computed together, from a bounded queue."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastamp.serving.errors import RequestError
from fastamp.utils.errors import DataError


class Batcher:
    """Compute features of images in batches, in one thread.

    A batch starts when it is full, or ``wait`` seconds after its first image; while it is computed, the next images
    collect. All methods are called in the event loop.

    Args:
        compute: function from a list of images to features (N, D).
        batch: maximum number of images of a batch.
        queue: maximum number of images that wait or are computed.
        wait: seconds that the first image waits for others.
        observe: called with the number of images of each batch. Default: None.

    Attributes:
        pending: number of images that wait or are computed.
    """

    def __init__(
        self,
        compute: Callable[[list[Any]], Tensor],
        *,
        batch: int,
        queue: int,
        wait: float,
        observe: Callable[[int], None] | None = None,
    ) -> None:
        self._compute, self._batch, self._queue, self._wait, self._observe = compute, batch, queue, wait, observe
        self._waiting: deque[tuple[Any, asyncio.Future[Tensor]]] = deque()
        self._thread = ThreadPoolExecutor(1, "model")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.pending = 0

    def start(self) -> None:
        """Start to compute batches."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Compute all images that wait, and stop."""
        while self.pending:
            await asyncio.sleep(0.01)
        if self._task:
            self._task.cancel()
        self._thread.shutdown()

    def check(self, count: int) -> None:
        """Check that there are places for further images.

        Raises:
            RequestError: if not; status 429.
        """
        if self.pending + count > self._queue:
            raise RequestError(
                429, "queue_full", f"{self.pending} images are waiting, of at most {self._queue}", "try again later"
            )

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Take places for images inside the context; see ``check``."""
        self.check(count)
        self.pending += count
        try:
            yield
        finally:
            self.pending -= count

    async def features(self, images: Sequence[Any]) -> Tensor:
        """Compute the features (N, D) of images, for which the caller has taken ``places``.

        Raises:
            DataError: if an image is invalid; images of other requests are not affected.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Tensor]] = [loop.create_future() for _ in images]
        self._waiting.extend(zip(images, futures, strict=True))
        self._wake.set()
        # The first error must not leave the others unread.
        found = await asyncio.gather(*futures, return_exceptions=True)
        features = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            features.append(each)
        return torch.stack(features)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if len(self._waiting) < self._batch and self._wait:
                await asyncio.sleep(self._wait)
            taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            if not self._waiting:
                self._wake.clear()
            if self._observe:
                self._observe(len(taken))
            try:
                results: Sequence[Any] = await loop.run_in_executor(
                    self._thread, self._results, [image for image, _ in taken]
                )
            except Exception as error:  # a bug, or out of memory: the requests fail, the service continues
                results = [error] * len(taken)
            for (_, future), result in zip(taken, results, strict=True):
                if future.cancelled():  # the client has disconnected
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _results(self, images: list[Any]) -> list[Tensor | Exception]:
        """Compute the features of a batch; if it fails, of each image, so that only the invalid ones fail."""
        try:
            return list(self._compute(images))
        except DataError as error:
            if len(images) == 1:
                return [error]
            return [self._results([image])[0] for image in images]
