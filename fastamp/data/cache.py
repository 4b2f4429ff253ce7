"""Decoded images in one memory-mapped file, which all workers and processes of a machine read."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from fastamp.data.datasets.base import ImageItem, data_root
from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError
from fastamp.utils.files import expand
from fastamp.utils.moved import moved_names
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

__getattr__ = moved_names(__name__, {"ImageStore": "fastamp.data.cache.ImageCache"})

_VERSION = 2
_SUFFIX, _PARTIAL_SUFFIX = ".images", ".unfinished"
_CHUNK = 64
_SHARED_MEMORY = Path("/dev/shm")


class ImageCache:
    """Images of one size, decoded once: on disk for all later runs, or in memory for those that run at the time.

    The file's name says which images it holds: their paths, sizes and times of change, the parts that are cut out, and
    the size that they are resized to. So a store whose images have changed is built anew, and the old one goes. It
    appears under its name when it is whole: an interrupted build leaves nothing that counts, and of several processes
    one builds and the others wait.

    Args:
        items: the images.
        shape: (C, H, W) of each.
        read: index of an item -> (C, H, W) uint8, one that several threads call.
        where: ``"disk"`` or ``"ram"``.
        folder: that holds the store; empty is ``.fastamp-cache`` in the data root, or ``~/.cache/fastamp`` where the
            root cannot be written to; of no effect in memory.
        kind: what else the images depend on: their resizing, cropping and interpolation.

    Attributes:
        images: (N, C, H, W) uint8, memory-mapped; not to be written to.
        path: of the file.

    Raises:
        DataError: there is no room, no folder that can be written to, or an image cannot be read.
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
            while file is None:  # another may remove it before it is opened
                if not self._is_complete(size):
                    _remove_unused(base, f"{name}-*")
                    self._build(size, read)
                file = self._open()
        logger.info("%d images of %s are read from the cache %s", len(items), "x".join(map(str, shape[1:])), self.path)
        self.images = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c", shape=size))
        self._release = weakref.finalize(self, _release_file, file, self.path, in_memory=where == "ram")

    def _is_complete(self, size: tuple[int, ...]) -> bool:
        return self.path.exists() and self.path.stat().st_size == np.prod(size)

    def _open(self) -> BinaryIO | None:
        """Return the file, which nobody removes while it is open, if it is there yet."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        return file if os.fstat(file.fileno()).st_nlink else None

    def close(self) -> None:
        """Give the store up, as happens by itself when nothing uses it; one in memory goes with its last user."""
        self._release()

    def _build(self, size: tuple[int, ...], read: Callable[[int], Tensor]) -> None:
        count = int(np.prod(size))
        logger.info("decoding %d images once into %s (%.2f GB)", size[0], self.path, count / 1e9)
        unfinished = self.path.with_suffix(_PARTIAL_SUFFIX)
        free = shutil.disk_usage(self.path.parent).free
        try:
            if count > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with unfinished.open("wb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # what is left of a build that was killed has no lock
                # Reserves the room, so that a disk that fills up is known here, and not by a signal.
                reserve = getattr(os, "posix_fallocate", lambda number, start, length: os.truncate(number, length))
                reserve(file.fileno(), 0, count)
                mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=size)
                self._fill(torch.from_numpy(mapped), read)
                mapped.flush()
            os.replace(unfinished, self.path)
        except OSError as error:
            elsewhere = "DATALOADER.CACHE disk" if self._where == "ram" else "DATALOADER.CACHE_DIR to another folder"
            raise DataError(
                f"DATALOADER.CACHE: {self.path} cannot be written: {error.strerror or error}; it takes "
                f"{count / 1e9:.2f} GB, and {free / 1e9:.2f} GB were free there.\n"
                f"  fix: room there, {elsewhere}, or DATALOADER.CACHE none"
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def _fill(self, images: Tensor, read: Callable[[int], Tensor]) -> None:
        def fill(start: int) -> int:
            for number in range(start, min(start + _CHUNK, len(images))):
                images[number] = read(number)
            return start

        # Decoding and resizing run without Python's lock.
        with ThreadPoolExecutor(available_cores()) as pool:
            starts = range(0, len(images), _CHUNK)
            try:
                for _ in track(pool.map(fill, starts), len(starts), "decoding"):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _fingerprint(items: Sequence[ImageItem], shape: tuple[int, int, int], kind: str) -> tuple[str, str]:
    """Return a name for the list of images, and one for their content."""
    listed, content = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=16)
    listed.update(json.dumps([_VERSION, shape, kind]).encode())
    for item in items:
        line = f"{os.path.abspath(item.path)}\0{item.box}\n".encode(errors="surrogateescape")
        listed.update(line)
        try:
            status = os.stat(item.path)
        except OSError:
            content.update(line)  # reading it will say what is wrong
        else:
            content.update(line + f"{status.st_size} {status.st_mtime_ns}\n".encode())
    return listed.hexdigest(), content.hexdigest()


def _memory_folder() -> Path:
    base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"fastamp-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        # Anybody can make it there before us, and would then read the images, or replace them.
        raise DataError(
            f"DATALOADER.CACHE ram: {folder} is another user's, a link, or one that others can write to.\n"
            "  fix: have it removed, or DATALOADER.CACHE disk"
        )
    return folder


def _disk_folder(folder: str) -> Path:
    """Return the first folder of those that come into question that can be written to."""
    fallback = expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fastamp"
    root = [data_root() / ".fastamp-cache"] if data_root().is_dir() else []
    candidates = [expand(folder)] if folder else [*root, fallback]
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=candidate):
                pass
        except OSError as error:
            reason = f"{candidate.absolute()}: {error.strerror or error}"
            logger.info("DATALOADER.CACHE: cannot write to %s", reason)
            continue
        return candidate
    raise DataError(f"DATALOADER.CACHE has no folder that can be written to: {reason}.\n  fix: DATALOADER.CACHE_DIR")


def _release_file(file: BinaryIO, path: Path, *, in_memory: bool) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the mapping holds the file, and with it a lock, beyond its closing
    file.close()
    if in_memory:
        _remove_unused(path.parent, path.name)


@contextmanager
def _build_lock(lock: Path, target: Path) -> Iterator[None]:
    """Keep other processes from building the same store."""
    with lock.open("ab") as file:  # so that what a link there leads to is left as it is
        try:
            if not _try_lock(file):
                if not target.exists():
                    logger.info("waiting for another process, which is decoding the images into %s", target)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"DATALOADER.CACHE: files in {lock.parent} cannot be locked: {error.strerror or error}.\n"
                "  fix: DATALOADER.CACHE_DIR to a folder on a disk of this machine"
            ) from error
        yield


def _try_lock(file: BinaryIO) -> bool:
    """Return whether this process could take the lock at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(folder: Path, pattern: str) -> None:
    """Remove stores, and what is left of builds, that no process has open."""
    for path in folder.glob(pattern):
        if path.suffix not in (_SUFFIX, _PARTIAL_SUFFIX):
            continue
        try:
            with path.open("rb") as file:
                if _try_lock(file):
                    path.unlink()
        except FileNotFoundError:
            continue
