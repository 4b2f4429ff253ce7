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
from fastamp.serving.options import Limits
from fastamp.utils.errors import DataError

# An image, its feature, and the time of the event loop's clock since which it waits.
_Waiting = tuple[Any, "asyncio.Future[Tensor]", float]


class Batcher:
    """Compute features of images in batches, in one or more threads.

    A batch starts when a thread is free and it is full, or ``wait_ms`` after its first image; while it is computed, the
    next images collect. Idle threads divide the images that wait, and start at the same time. All methods are called in
    the event loop.

    Args:
        compute: function from a list of images to features (N, D).
        limits: limits of a batch and of the queue.
        workers: number of threads, which compute batches at the same time.

    Attributes:
        pending: number of images that wait or are computed.
        starts: time.monotonic() at the starts of the batches that are computed.
    """

    def __init__(self, compute: Callable[[list[Any]], Tensor], limits: Limits, workers: int) -> None:
        self._compute, self._limits, self._workers = compute, limits, workers
        self._waiting: list[_Waiting] = []
        self._threads = ThreadPoolExecutor(workers, "model")
        self.pending = 0
        self.starts: list[float] = []

    async def stop(self) -> None:
        """Compute all images that wait, and stop."""
        while self.pending:
            await asyncio.sleep(0.01)
        self._threads.shutdown()

    def check(self, count: int) -> None:
        """Check that there are places for further images.

        Raises:
            RequestError: if not; status 429.
        """
        if self.pending + count > self._limits.queue:
            message = f"{self.pending} images are waiting, of at most {self._limits.queue}"
            raise RequestError(429, "queue_full", message, "try again later")

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
        loop.call_soon(self._start_batches)
        # The first error must not leave the others unread.
        await asyncio.gather(*futures, return_exceptions=True)
        return torch.stack([future.result() for future in futures])

    def _start_batches(self) -> None:
        """Start batches of the images that wait, or look again when the first one has waited for others."""
        self._waiting = [waiting for waiting in self._waiting if not waiting[1].cancelled()]
        idle, most = self._workers - len(self.starts), self._limits.batch
        if not self._waiting or not idle:
            return
        loop = asyncio.get_running_loop()
        remaining = self._waiting[0][2] + self._limits.wait_ms / 1000 - loop.time()
        if len(self._waiting) < most and remaining > 0:
            loop.call_later(remaining, self._start_batches)
            return
        taken, self._waiting = self._waiting[: idle * most], self._waiting[idle * most :]
        size, start = math.ceil(len(taken) / idle), time.monotonic()
        batches = [taken[first : first + size] for first in range(0, len(taken), size)]
        self.starts += [start] * len(batches)  # before the first one divides the threads of PyTorch
        for batch in batches:
            computing = loop.run_in_executor(self._threads, self._results, [image for image, _, _ in batch])
            computing.add_done_callback(partial(self._set_results, batch, start))

    def _set_results(
        self, batch: list[_Waiting], start: float, computing: "asyncio.Future[list[Tensor | Exception]]"
    ) -> None:
        """Set the results of a batch that was computed."""
        self.starts.remove(start)
        self._start_batches()
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
