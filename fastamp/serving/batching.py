"""Dynamic batching: images of concurrent requests are computed together, from a bounded queue."""

import asyncio
import math
import time
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
        observe: called with the number of images of each batch. Default: None.

    Attributes:
        pending: number of images that wait or are computed.
        computing: number of batches that are computed.
        starts: time.monotonic() at the starts of these batches.
    """

    def __init__(
        self,
        compute: Callable[[list[Any]], Tensor],
        *,
        batch: int,
        queue: int,
        wait: float,
        workers: int = 1,
        observe: Callable[[int], None] | None = None,
    ) -> None:
        self._compute, self._batch, self._queue, self._wait, self._observe = compute, batch, queue, wait, observe
        # Images, and the seconds of the event loop's clock since which they wait.
        self._waiting: deque[tuple[Any, asyncio.Future[Tensor], float]] = deque()
        self._threads = ThreadPoolExecutor(workers, "model")
        self._workers = workers
        self._changed = asyncio.Event()  # an image waits, or a thread is free
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self.pending = self.computing = 0
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
            self._drop_abandoned()
            if not self._waiting or self.computing == self._workers:
                continue
            remaining = self._waiting[0][2] + self._wait - loop.time()
            if len(self._waiting) < self._batch and remaining > 0:
                await asyncio.sleep(remaining)
                self._drop_abandoned()
            idle = self._workers - self.computing
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), idle * self._batch))]
            if not taken:
                continue
            size = math.ceil(len(taken) / idle)
            batches = [taken[start : start + size] for start in range(0, len(taken), size)]
            self.computing += len(batches)  # before the first one divides the threads of PyTorch
            for batch in batches:
                if self._observe:
                    self._observe(len(batch))
                task = loop.create_task(self._compute_batch(batch))
                self._tasks.add(task)  # the event loop keeps no reference
                task.add_done_callback(self._tasks.discard)

    def _drop_abandoned(self) -> None:
        """Drop the images of requests that are no longer awaited."""
        self._waiting = deque(waiting for waiting in self._waiting if not waiting[1].cancelled())

    async def _compute_batch(self, batch: list[tuple[Any, asyncio.Future[Tensor], float]]) -> None:
        """Compute a batch in a thread and set its results."""
        loop, start = asyncio.get_running_loop(), time.monotonic()
        self.starts.append(start)
        try:
            images = [image for image, _, _ in batch]
            results: Sequence[Any] = await loop.run_in_executor(self._threads, self._results, images)
        except Exception as error:  # a bug, or out of memory: the requests fail, the service continues
            results = [error] * len(batch)
        self.starts.remove(start)
        self.computing -= 1
        self._changed.set()
        for (_, future, _), result in zip(batch, results, strict=True):
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
