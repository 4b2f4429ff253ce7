"""Decoding of uploads: usual JPEG files in threads, all other images in processes that end at a deadline."""

import asyncio
import multiprocessing
import os
import queue
import resource
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.data.decode import decode_image, jpeg_header
from fastamp.data.transforms import Transforms
from fastamp.inference.gallery_source import make_picture
from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError

# The decoders of these files take at most about 20 ms. A pipe to a process takes as long as decoding an image of
# 256 x 128 pixels.
_THREAD_BYTES, _THREAD_PIXELS, _THREAD_SCANS = 2**20, 2**20, 20
_MOST_PROCESSES = 4
# Memory of a process that decodes: a progressive file needs 6 bytes per pixel, and two copies of its pixels 8.
_BYTES_PER_PIXEL, _OTHER_BYTES = 16, 2**26


@dataclass(frozen=True)
class Decoding:
    """Function that decodes an upload.

    Attributes:
        transforms: limits of the image, and its transform.
        pictures: if True, also make a small picture.
    """

    transforms: Transforms
    pictures: bool

    def __call__(self, content: bytes, name: str) -> tuple[Tensor, bytes | None]:
        """Return the preprocessed image (C, H, W) uint8, and its picture.

        Raises:
            DataError: see ``decode_image``.
        """
        transforms, resize = self.transforms, self.transforms.resize
        limits: dict[str, Any] = {"max_pixels": transforms.max_pixels, "least_side": resize.least_side}
        pixels = decode_image(content, transforms.channels, name=name, bit_depth=transforms.bit_depth, **limits)
        return resize(pixels), make_picture(pixels) if self.pictures else None


class Decoder:
    """Decode uploads.

    Args:
        decoding: how to decode them.
        seconds: time after which the process that decodes an image is ended.
    """

    def __init__(self, decoding: Decoding, seconds: float) -> None:
        self._decoding, self._seconds, self._closed = decoding, seconds, False
        self._threads = ThreadPoolExecutor(available_cores(), "decode")
        count = min(available_cores(), _MOST_PROCESSES)
        self._callers = ThreadPoolExecutor(count, "decode-process")
        self._idle: queue.SimpleQueue[ProcessPoolExecutor | None] = queue.SimpleQueue()
        self._pids: set[int] = set()
        for _ in range(count):
            self._idle.put(None)  # a process is started with the first image

    def start(self) -> None:
        """Start the server of processes, so that the first image does not wait for its imports."""
        self._callers.submit(_forkserver)

    def close(self) -> None:
        """End the threads and the processes."""
        self._closed = True
        for child in multiprocessing.active_children():
            if child.pid in self._pids:
                child.kill()
                child.join()
        for pool in (self._threads, self._callers):
            pool.shutdown(cancel_futures=True)

    async def decode(self, content: bytes, name: str) -> tuple[Tensor, bytes | None]:
        """Decode an upload; see ``Decoding``.

        Raises:
            DataError: see ``Decoding``, or if it takes too long.
        """
        function: Callable[[bytes, str], tuple[Tensor, bytes | None]]
        pool, function = (
            (self._threads, self._decoding) if is_usual(content) else (self._callers, self._decode_in_process)
        )
        return await asyncio.get_running_loop().run_in_executor(pool, function, content, name)

    def _decode_in_process(self, content: bytes, name: str) -> tuple[Tensor, bytes | None]:
        """Decode an image in a process, which ends itself if that takes too long."""
        process = self._idle.get()
        try:
            for _ in range(2):  # another program may have ended the process
                start = time.monotonic()
                try:
                    process = process or self._new_process(name)
                    pixels, picture = process.submit(_decode, self._decoding, self._seconds, content, name).result()
                    return torch.from_numpy(pixels), picture
                except BrokenProcessPool:
                    process = None
                if time.monotonic() - start >= self._seconds:
                    raise DataError(
                        f"the image {name} was not decoded within {self._seconds:g} seconds.\n"
                        "  fix: send a smaller image, or a JPEG file"
                    )
            raise DataError(
                f"the image {name} cannot be read: the process that decodes it has ended.\n"
                "  fix: send it again; if this fails again, send a smaller copy"
            )
        finally:
            self._idle.put(process)

    def _new_process(self, name: str) -> ProcessPoolExecutor:
        if self._closed:
            raise DataError(
                f"the image {name} was not decoded, because the service stops.\n  fix: send it again after the restart"
            )
        memory = self._decoding.transforms.max_pixels * _BYTES_PER_PIXEL + _OTHER_BYTES
        process = ProcessPoolExecutor(1, _forkserver(), _prepare, (memory,))
        self._pids.add(process.submit(os.getpid).result())
        return process


def is_usual(content: bytes) -> bool:
    """Return True if a file is a small JPEG file with few scans, which is decoded in a short time."""
    if content[:2] != b"\xff\xd8" or len(content) > _THREAD_BYTES:
        return False
    try:
        width, height, scans = jpeg_header(content, "")
    except DataError:
        return False
    return 0 < width * height <= _THREAD_PIXELS and scans <= _THREAD_SCANS


def _forkserver() -> Any:
    """Start the process that forks the others, which has a single thread; return its context."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


def _prepare(memory: int) -> None:
    """Prepare a process that decodes, and limit its memory to ``memory`` bytes more than it has (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the service ends this process
    torch.set_num_threads(1)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _decode(decoding: Decoding, seconds: float, content: bytes, name: str) -> tuple[np.ndarray, bytes | None]:
    """Decode an image; the timer ends the process, also while it is in a library."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        pixels, picture = decoding(content, name)
        return pixels.contiguous().numpy(), picture
    except (MemoryError, RuntimeError) as error:
        raise DataError(
            f"the image {name} cannot be read: {type(error).__name__}.\n  fix: send a smaller image, or a JPEG file"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
