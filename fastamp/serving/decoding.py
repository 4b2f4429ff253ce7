"""Decoding of uploads: usual JPEG files in threads, all other images in processes that end at a deadline."""

import asyncio
import multiprocessing
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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

    def __call__(self, content: bytes, name: str) -> tuple[Tensor, bytes]:
        """Return the preprocessed image (C, H, W) uint8, and its picture or b"".

        Raises:
            DataError: see ``decode_image``.
        """
        transforms, resize = self.transforms, self.transforms.resize
        limits: dict[str, Any] = {"max_pixels": transforms.max_pixels, "least_side": resize.least_side}
        pixels = decode_image(content, transforms.channels, name=name, bit_depth=transforms.bit_depth, **limits)
        return resize(pixels), make_picture(pixels) if self.pictures else b""


class Decoder:
    """Decode uploads.

    Args:
        decoding: how to decode them.
        seconds: time after which the process that decodes an image is ended.
    """

    def __init__(self, decoding: Decoding, seconds: float) -> None:
        self._decoding = decoding
        self._threads = ThreadPoolExecutor(available_cores(), "decode")
        count = min(available_cores(), _MOST_PROCESSES)
        self._callers = ThreadPoolExecutor(count, "decode-process")
        self._processes: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all = [_Process(decoding, seconds) for _ in range(count)]
        for process in self._all:
            self._processes.put(process)

    def start(self) -> None:
        """Start the server of processes, so that the first image does not wait for its imports."""
        self._callers.submit(_start_server)

    def close(self) -> None:
        """End the threads and the processes."""
        for process in self._all:
            process.close()
        for pool in (self._threads, self._callers):
            pool.shutdown(cancel_futures=True)

    async def decode(self, content: bytes, name: str) -> tuple[Tensor, bytes]:
        """Decode an upload; see ``Decoding``.

        Raises:
            DataError: see ``Decoding``, or if it takes too long.
        """
        function: Callable[[bytes, str], tuple[Tensor, bytes]]
        pool, function = (
            (self._threads, self._decoding) if is_usual(content) else (self._callers, self._decode_in_process)
        )
        return await asyncio.get_running_loop().run_in_executor(pool, function, content, name)

    def _decode_in_process(self, content: bytes, name: str) -> tuple[Tensor, bytes]:
        process = self._processes.get()
        try:
            return process.decode(content, name)
        finally:
            self._processes.put(process)


def is_usual(content: bytes) -> bool:
    """Return True if a file is a small JPEG file with few scans, which is decoded in a short time."""
    if content[:2] != b"\xff\xd8" or len(content) > _THREAD_BYTES:
        return False
    try:
        width, height, scans = jpeg_header(content, "")
    except DataError:
        return False
    return 0 < width * height <= _THREAD_PIXELS and scans <= _THREAD_SCANS


class _Process:
    """Process that decodes one image after the other; started with the first one, and again after it has ended."""

    def __init__(self, decoding: Decoding, seconds: float) -> None:
        self._decoding, self._seconds = decoding, seconds
        self._running: tuple[Any, Connection] | None = None  # process, and connection to it
        self._lock, self._closed = threading.Lock(), False

    def decode(self, content: bytes, name: str) -> tuple[Tensor, bytes]:
        """Decode an image; the process is ended if it takes too long."""
        for _ in range(2):  # another program may have ended the process
            process, connection = self._started(name)
            timer, start = threading.Timer(self._seconds, process.kill), time.monotonic()
            timer.start()
            try:
                connection.send((content, name))
                error, values, picture = connection.recv()
            except (EOFError, OSError):
                self._running = None
                process.kill()
                process.join()
                connection.close()
            else:
                if error:
                    raise DataError(error)
                return torch.from_numpy(values), picture
            finally:
                timer.cancel()
            if time.monotonic() - start >= self._seconds:
                raise DataError(
                    f"the image {name} was not decoded within {self._seconds:g} seconds.\n"
                    "  fix: send a smaller image, or a JPEG file"
                )
        raise DataError(
            f"the image {name} cannot be read: the process that decodes it has ended.\n"
            "  fix: send it again; if this fails again, send a smaller copy"
        )

    def close(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self._closed = True
            if self._running:
                self._running[0].kill()
                self._running[0].join()

    def _started(self, name: str) -> tuple[Any, Connection]:
        with self._lock:
            if self._closed:
                raise DataError(
                    f"the image {name} was not decoded, because the service stops.\n"
                    "  fix: send it again after the restart"
                )
            if self._running is None:
                context = _start_server()
                connection, theirs = context.Pipe()
                process = context.Process(target=_run, args=(theirs, self._decoding), daemon=True)
                process.start()
                theirs.close()
                connection.recv()
                self._running = process, connection
            return self._running


def _start_server() -> Any:
    """Start the process that forks the others, which has a single thread; return its context."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


def _run(connection: Connection, decoding: Decoding) -> None:
    """Send True, then answer with (error, pixels, picture) until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the service ends this process
    torch.set_num_threads(1)
    _limit_memory(decoding.transforms.max_pixels * _BYTES_PER_PIXEL + _OTHER_BYTES)
    connection.send(True)
    while True:
        try:
            content, name = connection.recv()
        except EOFError:
            return
        try:
            pixels, picture = decoding(content, name)
            answer: tuple[str, Any, bytes] = ("", pixels.contiguous().numpy(), picture)
        except DataError as error:
            answer = (str(error), None, b"")
        except (MemoryError, RuntimeError) as error:
            answer = (f"the image {name} cannot be read: {type(error).__name__}", None, b"")
        connection.send(answer)


def _limit_memory(count: int) -> None:
    """Limit the memory of this process to ``count`` bytes more than it has (Linux)."""
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + count, used + count))
