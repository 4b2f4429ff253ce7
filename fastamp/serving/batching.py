"""Dynamic batching: images of concurrent requests are computed together, from a bounded queue."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastamp.serving.errors import RequestError
from fastamp.utils.errors import DataError

# An image, its feature, and the time of the event loop's clock since which it waits.
_Waiting = tuple[Any, "asyncio.Future[Tensor]", float]


class Batcher:
    """Compute features of images in batches, in one or more threads.

    A batch starts when a thread is free and it is full, or ``wait`` seconds after its first image; while it is
    computed, the next images collect. Idle threads divide the images that wait, and start at the same time. All
    methods are called in the event loop.

    Args:
        compute: function from a list of images to features (N, D).
        batch: maximum number of images of a batch.
        queue: maximum number of images that wait or are computed.
        wait: seconds that the first image waits for others.
        workers: number of threads, which compute batches at the same time. Default: 1.

    Attributes:
        pending: number of images that wait or are computed.
        starts: time.monotonic() at the starts of the batches that are computed.
    """

    def __init__(
        self,
        compute: Callable[[list[Any]], Tensor],
        *,
        batch: int,
        queue: int,
        wait: float,
        workers: int = 1,
    ) -> None:
        self._compute, self._batch, self._queue, self._wait, self._workers = compute, batch, queue, wait, workers
        self._waiting: list[_Waiting] = []
        self._threads = ThreadPoolExecutor(workers, "model")
        self._changed = asyncio.Event()  # an image waits, or a thread is free
        self._task: asyncio.Task[None] | None = None
        self.pending = 0
        self.starts: list[float] = []

    def start(self) -> None:
        """Start to compute batches."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Compute all images that wait, and stop."""
        while self.pending:
            await asyncio.sleep(0.01)
        if self._task:
            self._task.cancel()
        self._threads.shutdown()

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
        self._waiting.extend((image, future, loop.time()) for image, future in zip(images, futures, strict=True))
        self._changed.set()
        # The first error must not leave the others unread.
        await asyncio.gather(*futures, return_exceptions=True)
        return torch.stack([future.result() for future in futures])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._waiting or len(self.starts) == self._workers:
                continue
            remaining = self._waiting[0][2] + self._wait - loop.time()
            if len(self._waiting) < self._batch and remaining > 0:
                await asyncio.sleep(remaining)
            awaited = [waiting for waiting in self._waiting if not waiting[1].cancelled()]
            idle = self._workers - len(self.starts)
            taken, self._waiting = awaited[: idle * self._batch], awaited[idle * self._batch :]
            size = max(1, math.ceil(len(taken) / idle))
            batches = [taken[first : first + size] for first in range(0, len(taken), size)]
            start = time.monotonic()
            self.starts += [start] * len(batches)  # before the first one divides the threads of PyTorch
            for batch in batches:
                computing = loop.run_in_executor(self._threads, self._results, [image for image, _, _ in batch])
                computing.add_done_callback(partial(self._set_results, batch, start))

    def _set_results(
        self, batch: list[_Waiting], start: float, computing: "asyncio.Future[list[Tensor | Exception]]"
    ) -> None:
        """Set the results of a batch that was computed."""
        self.starts.remove(start)
        self._changed.set()
        error = computing.exception()  # a bug, or out of memory: the requests fail, the service continues
        results = [error] * len(batch) if error else computing.result()
        for (_, future, _), result in zip(batch, results, strict=True):
            if future.cancelled():  # the client has disconnected
                continue
            if isinstance(result, BaseException):
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
