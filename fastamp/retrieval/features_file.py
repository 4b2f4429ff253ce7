"""File of features, as ``fastamp extract`` writes it: an npz file whose matrix of features is memory-mapped."""

from os import PathLike
from pathlib import Path

import numpy as np

from fastamp.retrieval.columns import OWN_COLUMNS, ImageColumns
from fastamp.retrieval.features import Features
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.npz import map_array, open_arrays, write_arrays
from fastamp.utils.files import write_atomically

# Array -> kinds of dtypes, and shape; N is the number of images, D any number.
_ARRAYS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "features": ("f", ("N", "D")),
    "paths": ("U", ("N",)),
    "pids": ("iuU", ("N",)),
    "camids": ("iu", ("N",)),
    "config_hash": ("U", ()),
    "checkpoint": ("U", ()),
    "metric": ("U", ()),
    "split": ("U", ("N",)),
    "boxes": ("iu", ("N", 4)),
    "cameras": ("U", ("N",)),
}
_OPTIONAL = ("split", "boxes", "cameras")
_MODEL = ("metric", "config_hash", "checkpoint")  # in the order of ``ModelId``
_WORDS = {"f": "float32", "i": "integers", "U": "text"}
COLUMN_PREFIX = "column."
"""Prefix of the arrays of further columns, e.g. ``column.species``."""


def read_features(path: str | PathLike[str]) -> Features:
    """Read a file that ``fastamp extract`` wrote.

    Args:
        path: npz file.

    Returns:
        The features, memory-mapped.

    Raises:
        DataError: if the file is missing, is damaged or is not an extraction.
    """
    path = Path(path).expanduser()
    with open_arrays(path, "extraction", fix="create the file with fastamp extract") as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        column_names = [name for name in names if name.startswith(COLUMN_PREFIX)]
        own_names = [name for name in _ARRAYS if name in names or name not in _OPTIONAL]
        arrays = {name: map_array(archive, name) for name in (*own_names, *column_names)}
        matrix = arrays["features"]
        for name, array in arrays.items():
            _check_array(name, array, len(matrix) if matrix.ndim else 0)
        model = ModelId(matrix.shape[1], *(str(arrays[name]) for name in _MODEL))
        summed = ("features", "paths", "config_hash", "metric", *sorted(column_names))
        fingerprint = "-".join(f"{archive.getinfo(f'{name}.npy').CRC:08x}" for name in summed)
    own = {name: arrays[name] for name in OWN_COLUMNS if name in arrays}
    further = {name.removeprefix(COLUMN_PREFIX): arrays[name] for name in column_names}
    return Features(path, matrix, ImageColumns(**own, further=further), model, fingerprint)


def write_features(features: Features) -> None:
    """Write features to the file ``features.path``, see ``read_features``.

    Raises:
        WriteError: if the file cannot be written.
    """
    images = features.images
    arrays = {"features": features.matrix} | {name: np.array(vars(features.model)[name]) for name in _MODEL}
    arrays |= {name: values for name in OWN_COLUMNS if (values := vars(images)[name]) is not None}
    arrays |= {COLUMN_PREFIX + name: values for name, values in images.further.items()}
    write_atomically(features.path, lambda file: write_arrays(file, arrays))


def _check_array(name: str, array: np.ndarray, count: int) -> None:
    """Check the dtype and the shape of an array of a file with ``count`` images.

    Raises:
        ValueError: if they are wrong, or there are no features.
    """
    kinds, shape = _ARRAYS.get(name, ("iufU", ("N",) if array.ndim < 2 else ("N", "D")))
    sizes = tuple(count if size == "N" else size for size in shape)
    fits = array.dtype.kind in kinds and array.ndim == len(sizes)
    fits = fits and all(size in ("D", found) for size, found in zip(sizes, array.shape, strict=True))
    if not fits or (name == "features" and (array.dtype != np.float32 or not array.size)):
        expected = " or ".join(word for kind, word in _WORDS.items() if kind in kinds)
        shape_text = ", ".join(map(str, sizes))
        raise ValueError(f"expected {name} to be {expected} of shape ({shape_text}), got {array.dtype} {array.shape}")
