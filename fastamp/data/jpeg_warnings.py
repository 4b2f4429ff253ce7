"""Warnings of libjpeg about damaged data, which it prints to stderr without the name of the file."""

import functools
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

_WARNING = re.compile(r"(?:Corrupt JPEG data|Premature end of JPEG file|Invalid SOS parameters)[^\n]*\n?")
_AT_ONCE = 64


@contextmanager
def named_warnings(path: str) -> Iterator[None]:
    """Log the warnings that libjpeg prints in the block with the name of the file.

    Only in the processes of a data loader, and if the process has one thread: stderr belongs to the whole process.
    """
    if torch.utils.data.get_worker_info() is None and threading.active_count() > 1:
        yield
        return
    with _captured() as warnings:
        yield
    if warnings:
        logger.warning("the image %s is damaged, and a part of it is wrong: %s", path, warnings[0])


def damaged_files(paths: Sequence[str], read: Callable[[str], object]) -> dict[str, str]:
    """Decode files and return the warnings of libjpeg by path, for files that are decoded nevertheless.

    Args:
        paths: image files.
        read: function that decodes a file; must be thread-safe.
    """

    def try_to_read(path: str) -> None:
        with suppress(DataError):  # reported as unreadable
            read(path)

    damaged: dict[str, str] = {}
    starts = range(0, len(paths), _AT_ONCE)
    with ThreadPoolExecutor(available_cores()) as pool:
        for start in track(starts, len(starts), "looking for damaged images"):
            block = paths[start : start + _AT_ONCE]
            with _captured() as any_of_block:
                list(pool.map(try_to_read, block))
            for path in block if any_of_block else ():
                with _captured() as warnings:
                    try_to_read(path)
                if warnings:
                    damaged[path] = warnings[0]
    return damaged


@functools.lru_cache(maxsize=1)
def _buffer(process: int) -> int:
    """Return an open file in memory for the output of a process, which a forked one must not share."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("stderr")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextmanager
def _captured() -> Iterator[list[str]]:
    """Yield a list that contains the warnings of libjpeg after the block; other output is printed then."""
    warnings: list[str] = []
    buffer, stderr = _buffer(os.getpid()), os.dup(2)
    os.dup2(buffer, 2)
    try:
        yield warnings
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        if size := os.lseek(buffer, 0, os.SEEK_CUR):
            os.lseek(buffer, 0, os.SEEK_SET)
            text = os.read(buffer, size).decode(errors="replace")
            os.lseek(buffer, 0, os.SEEK_SET)
            warnings += [line.strip() for line in _WARNING.findall(text)]
            if other := _WARNING.sub("", text):
                os.write(2, other.encode())
