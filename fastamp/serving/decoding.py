"""Decoding of uploads: usual JPEG files in threads, all other images in processes that end at a deadline."""

import asyncio
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.data.decode import decode_image, jpeg_header
from fastamp.data.image_decoder import image_decoder
from fastamp.data.transforms import Transforms
from fastamp.inference.gallery_source import PICTURE_SIDE, make_picture
from fastamp.serving.errors import RequestError
from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError

# The decoders of these files take at most about 20 ms. A pipe to a process takes as long as decoding an image of
# 256 x 128 pixels.
_THREAD_BYTES, _THREAD_PIXELS, _THREAD_SCANS = 2**20, 2**20, 20
_MOST_PROCESSES = 4
# Memory of a process that decodes: a progressive file needs 6 bytes per pixel, and two copies of its pixels 8.
_BYTES_PER_PIXEL, _OTHER_BYTES = 16, 2**26


_Decoded = tuple[np.ndarray, bytes | None]


class _Local(threading.local):
    """The process of a thread, which is started with its first image."""

    process: ProcessPoolExecutor | None = None


class Decoder:
    """Decode uploads.

    Args:
        transforms: limits of an image, and its transform.
        seconds: time after which the process that decodes an image is ended.
        pictures: if True, also make a small picture.
    """

    def __init__(self, transforms: Transforms, seconds: float, *, pictures: bool) -> None:
        self._decode, self._seconds = partial(_decode, transforms, pictures), seconds
        self._decoder = transforms.decoder
        self._memory = transforms.max_pixels * _BYTES_PER_PIXEL + _OTHER_BYTES
        self._threads = ThreadPoolExecutor(available_cores(), "decode")
        self._callers = ThreadPoolExecutor(min(available_cores(), _MOST_PROCESSES), "decode-process")
        self._local, self._closed = _Local(), False
        self._pids: set[int] = set()

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
        """Decode an upload.

        Returns:
            The preprocessed image (C, H, W) uint8, and its picture.

        Raises:
            DataError: see ``decode_image``.
            RequestError: if it takes too long.
        """
        usual = is_usual(content)
        pool, function = (self._threads, self._decode) if usual else (self._callers, self._decode_in_process)
        pixels, picture = await asyncio.get_running_loop().run_in_executor(pool, function, content, name)
        return torch.from_numpy(pixels), picture

    def _decode_in_process(self, content: bytes, name: str) -> _Decoded:
        """Decode an image in the process of this thread, which ends itself if that takes too long."""
        for _ in range(2):  # another program may have ended the process
            start = time.monotonic()
            try:
                process = self._local.process or self._start_process()
                return process.submit(_decode_until, self._seconds, self._decode, content, name).result()
            except BrokenProcessPool:
                self._local.process = None
            if time.monotonic() - start >= self._seconds:
                message = f"the image {name} was not decoded within {self._seconds:g} seconds"
                raise RequestError(422, "invalid_image", message, "send a smaller image, or a JPEG file")
        message = f"the image {name} cannot be read: the process that decodes it has ended"
        raise RequestError(422, "invalid_image", message, "send it again; if this fails again, send a smaller copy")

    def _start_process(self) -> ProcessPoolExecutor:
        if self._closed:
            raise BrokenProcessPool("the service stops")
        process = self._local.process = ProcessPoolExecutor(1, _forkserver(), _prepare, (self._memory, self._decoder))
        self._pids.add(process.submit(os.getpid).result())
        return process


def is_usual(content: bytes) -> bool:
    """Return True if a file is a small JPEG file with few scans, which is decoded in a short time."""
    if content[:2] != b"\xff\xd8" or len(content) > _THREAD_BYTES:
        return False
    try:
        width, height, scans, _ = jpeg_header(content, "")
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


def _prepare(memory: int, decoder: str) -> None:
    """Prepare a process that decodes, and limit its memory to ``memory`` bytes more than it has (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the service ends this process
    image_decoder(decoder)  # maps its libraries before the limit applies
    torch.set_num_threads(1)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _decode(transforms: Transforms, pictures: bool, content: bytes, name: str) -> _Decoded:
    """Return the preprocessed image (C, H, W) uint8, and its picture."""
    decode = partial(decode_image, content, transforms.channels, name=name, **transforms.decoding)
    pixels, picture = decode(least_size=transforms.least_size), None
    if pictures:
        is_small = transforms.reduced and max(pixels.shape[1:]) < PICTURE_SIDE
        picture = make_picture(decode() if is_small else pixels)
    return transforms.resize(pixels).contiguous().numpy(), picture


def _decode_until(seconds: float, decode: Callable[[bytes, str], _Decoded], content: bytes, name: str) -> _Decoded:
    """Decode an image; the timer ends the process, also while it is in a library."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return decode(content, name)
    except (MemoryError, RuntimeError) as error:
        raise DataError(
            f"the image {name} cannot be read: {type(error).__name__}.\n  fix: send a smaller image, or a JPEG file"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
