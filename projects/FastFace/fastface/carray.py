"""Reader of test sets that are saved as bcolz arrays, which FastReID's FastFace reads; bcolz itself is not required."""

import importlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.utils.errors import ConfigError, DataError

_HEADER = 16  # of each file: b"blpk", version, 3 reserved bytes, number of chunks
_FIX = "restore the folder, or unpack insightface's .bin file of the same pairs"


def read_images(folder: Path) -> Iterator[np.ndarray]:
    """Read the images of a bcolz array of (N, 3, H, W) floats in -1..1, in order, one chunk at a time.

    The format is that of bcolz 1: ``meta/sizes``, ``meta/storage``, and a compressed chunk in each ``data/__<i>.blp``.

    Args:
        folder: folder of the array.

    Yields:
        (H, W, 3) uint8 images, ``x * 127.5 + 127.5``.

    Raises:
        ConfigError: if the package blosc is not installed.
        DataError: if a file is missing or damaged, or the array does not contain images.
    """
    try:
        blosc: Any = importlib.import_module("blosc")
    except ImportError as error:
        raise ConfigError(
            "bcolz arrays are compressed with Blosc, and the package blosc is not installed.\n"
            "  fix: pip install blosc; or unpack insightface's .bin file of the same pairs"
        ) from error
    shape, dtype, rows = _read_meta(folder)
    per_image = math.prod(shape[1:]) * dtype.itemsize
    remaining, number = shape[0], 0
    while remaining:
        path = folder / f"data/__{number}.blp"
        count = min(rows, remaining)
        try:
            content = path.read_bytes()
            # Size of the content, from the header of the chunk, before memory is allocated for it.
            (size,) = struct.unpack_from("<I", content, _HEADER + 4)
            if content[:4] != b"blpk" or not count * per_image <= size <= rows * per_image:
                raise ValueError(f"expected a chunk of {count} images of {per_image} bytes")
            values = np.frombuffer(blosc.decompress(content[_HEADER:]), dtype=dtype)
        except Exception as error:  # struct.error, and an exception of blosc that is derived from Exception
            raise DataError(f"cannot read {path.absolute()}: {error}.\n  fix: {_FIX}") from error
        images = values[: count * math.prod(shape[1:])].reshape(count, *shape[1:])
        if not np.abs(images).max(initial=0) <= 1 + 1e-4:  # also if it is NaN
            raise DataError(f"{path.absolute()}: expected values in -1..1.\n  fix: use an array of aligned faces")
        yield from np.rint(images * 127.5 + 127.5).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
        remaining, number = remaining - count, number + 1


def _read_meta(folder: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    """Return the shape and the dtype of the array, and the number of images in a chunk."""
    try:
        shape = tuple(json.loads((folder / "meta/sizes").read_text(encoding="utf-8"))["shape"])
        storage = json.loads((folder / "meta/storage").read_text(encoding="utf-8"))
        dtype, rows = np.dtype(storage["dtype"]), storage["chunklen"]
        if len(shape) != 4 or shape[1] != 3 or min(*shape, rows) < 1 or dtype.kind != "f":
            raise ValueError(f"expected floats of shape (N, 3, H, W), got {dtype} of shape {shape}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder.absolute()} is not a bcolz array of images: {error}.\n  fix: {_FIX}") from error
    return shape, dtype, rows


def read_labels(path: Path, images: int) -> list[bool]:
    """Read whether each pair is of one identity from ``<name>_list.npy``, next to the folder of the array.

    Args:
        path: file.
        images: number of images, two for each pair.

    Raises:
        DataError: if the file is missing or invalid.
    """
    try:
        same = np.load(path, allow_pickle=False)
        if same.shape != (images // 2,) or images % 2 or not np.isin(same, (0, 1)).all():
            raise ValueError(f"expected {images // 2} labels 0 or 1, got an array of shape {same.shape}")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"cannot read {path.absolute()}: {error}.\n  fix: {_FIX}") from error
    return same.astype(bool).tolist()
