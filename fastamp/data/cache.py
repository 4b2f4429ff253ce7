"""Memory-mapped cache of decoded images, shared by all processes of a machine."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from fastamp.data.datasets.base import ImageItem, data_root
from fastamp.data.datasets.items import PackedItems
from fastamp.data.file_parts import file_of
from fastamp.data.jpeg_warnings import decoding_pool, read_in_threads
from fastamp.utils.errors import DataError, system_cause
from fastamp.utils.files import expand, user_cache
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)


_VERSION = 2
_SUFFIX, _PARTIAL_SUFFIX = ".images", ".unfinished"
_AT_ONCE = 512
_SHARED_MEMORY = Path("/dev/shm")


class ImageCache:
    """Cache of decoded and resized images of equal size: on disk for later runs, or in memory for concurrent runs.

    The file name contains a fingerprint of the image files (paths, sizes, modification times), the boxes, the image
    shape and ``kind``. If an image file changes, the cache is built again and the old cache file is removed. The cache
    file is renamed to its final name when it is complete, so that an interrupted build never leaves an incomplete
    cache. One process builds the cache while other processes wait.

    Args:
        items: images to cache.
        shape: (C, H, W) of each image.
        read: called with the index of an item, returns the (C, H, W) uint8 image; must be thread-safe.
        where: where the cache is stored: ``"disk"`` or ``"ram"``.
        folder: folder of the cache on disk. Default: ``.fastamp-cache`` in the data root, or ``~/.cache/fastamp`` if
            the root is not writable.
        kind: other settings that affect the images, such as resizing, cropping and interpolation. Default "".

    Attributes:
        images: (N, C, H, W) uint8, memory-mapped; read-only.
        path: cache file.

    Raises:
        DataError: if there is not enough space, no folder is writable, or an image cannot be read.
    """

    def __init__(
        self,
        items: Sequence[ImageItem],
        shape: tuple[int, int, int],
        read: Callable[[int], Tensor],
        *,
        where: str,
        folder: str = "",
        kind: str = "",
    ) -> None:
        self._where = where
        base = _memory_folder() if where == "ram" else _disk_folder(folder)
        name, fingerprint = _fingerprint(items, shape, kind)
        self.path = base / f"{name}-{fingerprint}{_SUFFIX}"
        if where == "ram":
            _remove_unused(base, "*")
        size = (len(items), *shape)
        file = None
        with _build_lock(base / f"{name}.lock", self.path):
            while file is None:  # another process may remove it first
                if not self._is_complete(size):
                    _remove_unused(base, f"{name}-*")
                    self._build(size, read, items)
                file = self._open()
        logger.info("reading %d images of %s from the cache %s", len(items), "x".join(map(str, shape[1:])), self.path)
        self.images = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c", shape=size))
        self._release = weakref.finalize(self, _release_file, file, self.path, in_memory=where == "ram")

    def _is_complete(self, size: tuple[int, ...]) -> bool:
        return self.path.exists() and self.path.stat().st_size == np.prod(size)

    def _open(self) -> BinaryIO | None:
        """Open the cache file with a shared lock, which prevents its removal; return None if the file is missing."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        return file if os.fstat(file.fileno()).st_nlink else None

    def close(self) -> None:
        """Release the cache; also called on garbage collection.

        An in-memory cache is deleted when all processes have released it.
        """
        self._release()

    def _build(self, size: tuple[int, ...], read: Callable[[int], Tensor], items: Sequence[ImageItem]) -> None:
        count = int(np.prod(size))
        logger.info("decoding %d images into the cache %s (%.2f GB)", size[0], self.path, count / 1e9)
        unfinished = self.path.with_suffix(_PARTIAL_SUFFIX)
        free = shutil.disk_usage(self.path.parent).free
        try:
            if count > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with unfinished.open("wb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the file of a killed build is not locked
                # Allocate the space, so that a full disk is an error here instead of a signal later.
                reserve = getattr(os, "posix_fallocate", lambda number, start, length: os.truncate(number, length))
                reserve(file.fileno(), 0, count)
                mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=size)
                self._fill(torch.from_numpy(mapped), read, items)
                mapped.flush()
                # The mapping duplicates the descriptor; a traceback that refers to it would keep the lock.
                fcntl.flock(file, fcntl.LOCK_UN)
            os.replace(unfinished, self.path)
        except OSError as error:
            elsewhere = "DATALOADER.CACHE to disk" if self._where == "ram" else "DATALOADER.CACHE_DIR to another folder"
            raise DataError(
                f"DATALOADER.CACHE: cannot write {self.path}: {system_cause(error)}; required: "
                f"{count / 1e9:.2f} GB, free: {free / 1e9:.2f} GB.\n"
                f"  fix: free space in {self.path.parent}, set {elsewhere}, or set DATALOADER.CACHE to none"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _fill(self, images: Tensor, read: Callable[[int], Tensor], items: Sequence[ImageItem]) -> None:
        def fill(row: int) -> None:
            images[row] = read(row)

        starts, rows = range(0, len(images), _AT_ONCE), PackedItems.of(items).rows_by_file().tolist()
        with decoding_pool() as pool:  # decoding and resizing release the GIL
            for start in track(starts, len(starts), "decoding"):
                read_in_threads(pool, fill, rows[start : start + _AT_ONCE], lambda row: items[row].path)


def _fingerprint(items: Sequence[ImageItem], shape: tuple[int, int, int], kind: str) -> tuple[str, str]:
    """Return ``(list_hash, content_hash)``, hex digests of the list of images and of the image files.

    Both depend on ``shape``, ``kind``, paths and boxes; only ``content_hash`` depends on file sizes and modification
    times.
    """
    listed, content = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=16)
    listed.update(json.dumps([_VERSION, shape, kind]).encode())
    for item in items:
        line = f"{os.path.abspath(item.path)}\0{item.box}\n".encode(errors="surrogateescape")
        listed.update(line)
        try:
            status = os.stat(file_of(item.path))
        except OSError:
            content.update(line)  # reading it raises the error
        else:
            content.update(line + f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return listed.hexdigest(), content.hexdigest()


def _memory_folder() -> Path:
    base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"fastamp-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        # Another user could create the folder first, and read or replace the images.
        raise DataError(
            f"DATALOADER.CACHE ram: {folder} is a symbolic link, or another user owns it or can write to it.\n"
            "  fix: remove the folder, or set DATALOADER.CACHE to disk"
        )
    return folder


def _disk_folder(folder: str) -> Path:
    """Return the first writable folder for the cache on disk."""
    root = [data_root() / ".fastamp-cache"] if data_root().is_dir() else []
    candidates = [expand(folder)] if folder else [*root, user_cache()]
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=candidate):
                pass
        except OSError as error:
            reason = f"{candidate.absolute()}: {system_cause(error)}"
            logger.info("DATALOADER.CACHE: skipping a folder that is not writable: %s", reason)
            continue
        return candidate
    raise DataError(
        f"no writable folder for the image cache (DATALOADER.CACHE is disk): {reason}.\n"
        "  fix: set DATALOADER.CACHE_DIR to a writable folder"
    )


def _release_file(file: BinaryIO, path: Path, *, in_memory: bool) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the mapping would keep the lock after closing
    file.close()
    if in_memory:
        _remove_unused(path.parent, path.name)


@contextmanager
def _build_lock(lock: Path, target: Path) -> Iterator[None]:
    """Hold a file lock, so that only one process at a time builds a cache."""
    with lock.open("ab") as file:  # append: does not truncate the target of a link
        try:
            if not _try_lock(file):
                if not target.exists():
                    logger.info("waiting for another process to build the cache %s", target)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"DATALOADER.CACHE: cannot lock files in {lock.parent}: {system_cause(error)}.\n"
                "  fix: set DATALOADER.CACHE_DIR to a folder on a local disk"
            ) from error
        yield


def _try_lock(file: BinaryIO) -> bool:
    """Lock a file without waiting; return True on success."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(folder: Path, pattern: str) -> None:
    """Remove the cache files and partial files in ``folder`` that match ``pattern`` and are not open in any process."""
    for path in folder.glob(pattern):
        if path.suffix not in (_SUFFIX, _PARTIAL_SUFFIX):
            continue
        try:
            with path.open("rb") as file:
                if _try_lock(file):
                    path.unlink()
        except FileNotFoundError:
            continue
