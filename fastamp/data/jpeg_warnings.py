"""Warnings of libjpeg about damaged data, which it prints to stderr without the name of the file."""

import functools
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from fastamp.utils.env import available_cores

logger = logging.getLogger(__name__)

_WARNING = re.compile(r"(?:Corrupt JPEG data|Premature end of JPEG file|Invalid SOS parameters)[^\n]*\n?")
_POOL = "fastamp-decode"

S = TypeVar("S")
T = TypeVar("T")


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
        _log(path, warnings[0])


def decoding_pool() -> ThreadPoolExecutor:
    """Return a pool of threads for ``read_in_threads``."""
    return ThreadPoolExecutor(available_cores(), _POOL)


def read_in_threads(
    pool: ThreadPoolExecutor, read: Callable[[S], T], items: Sequence[S], name: Callable[[S], str]
) -> list[T]:
    """Call ``read`` for each item in a ``decoding_pool``, and log the warnings of libjpeg with the name of the file.

    Only if the process has no threads other than the caller and such pools: stderr belongs to the whole process.

    Args:
        pool: see ``decoding_pool``.
        read: thread-safe function that decodes the file of an item; called again to find a damaged file.
        items: what to read.
        name: function that returns the file of an item, for messages.

    Returns:
        Result for each item.
    """
    others = [thread for thread in threading.enumerate() if not thread.name.startswith(_POOL)]
    if len(others) > 1:
        return list(pool.map(read, items))
    results, damaged = read_all(pool, read, items)
    for number, warning in damaged.items():
        _log(name(items[number]), warning)
    return results


def read_all(pool: ThreadPoolExecutor, read: Callable[[S], T], items: Sequence[S]) -> tuple[list[T], dict[int, str]]:
    """Call ``read`` for each item in a pool while stderr is captured, also if the process has other threads.

    Returns:
        ``(results, damaged)``: result for each item, and the index of each damaged file -> first warning of libjpeg.
    """
    with _captured() as any_of_all:
        results = list(pool.map(read, items))
    damaged: dict[int, str] = {}
    for number, item in enumerate(items) if any_of_all else ():
        with _captured() as warnings:
            read(item)
        if warnings:
            damaged[number] = warnings[0]
    return results, damaged


def _log(path: str, warning: str) -> None:
    logger.warning(
        "the image %s is damaged, and a part of it is wrong: %s.\n  fix: restore the file, or remove it", path, warning
    )


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
