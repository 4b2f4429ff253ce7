"""File of features, as ``fastamp extract`` writes it: an npz file whose matrix of features is memory-mapped."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import numpy as np

from fastamp.retrieval.columns import OWN_COLUMNS, ImageColumns
from fastamp.retrieval.features import Features
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.npz import map_array, open_arrays, text_of, write_arrays
from fastamp.utils.errors import DataError
from fastamp.utils.files import write_atomically

_EXPECTED = ("features", "paths", "pids", "camids", "config_hash", "checkpoint", "metric")
# Column -> allowed dtype kinds and shape; N is the number of images.
_COLUMNS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "paths": ("U", ("N",)),
    "pids": ("iuU", ("N",)),
    "camids": ("iu", ("N",)),
    "split": ("U", ("N",)),
    "boxes": ("iu", ("N", 4)),
    "cameras": ("U", ("N",)),
}
COLUMN_PREFIX = "column."
"""Prefix of the arrays of further columns, e.g. ``column.species``."""
_BLOCK = 4096
_FIX = "create the file with fastamp extract"


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
    with open_arrays(path, "extraction", fix=_FIX) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        missing = [name for name in _EXPECTED if name not in names]
        if missing:
            raise DataError(
                f"{path} is not an extraction: missing arrays {', '.join(missing)}.\n  found: {', '.join(names)}\n"
                f"  fix: {_FIX}"
            )
        column_names = [name for name in names if name.startswith(COLUMN_PREFIX)]
        known = [name for name in names if name in {*_EXPECTED, *_COLUMNS}]
        arrays = {name: map_array(archive, name) for name in [*known, *column_names]}
        summed = ("features", "paths", *sorted(column_names))
        fingerprint = "-".join(f"{archive.getinfo(f'{name}.npy').CRC:08x}" for name in summed)
    matrix = arrays["features"]
    if matrix.ndim != 2 or matrix.dtype != np.float32:
        raise DataError(
            f"{path}: expected float32 features of shape (N, D), got {matrix.dtype} {matrix.shape}.\n  fix: {_FIX}"
        )
    if 0 in matrix.shape:
        raise DataError(
            f"{path} contains no features: expected shape (N, D) with N and D at least 1, got {matrix.shape}.\n"
            f"  fix: {_FIX}"
        )
    further = {name.removeprefix(COLUMN_PREFIX): arrays[name] for name in column_names}
    own = {name: arrays[name] for name in OWN_COLUMNS if name in arrays}
    _check_columns(path, own, further, len(matrix))
    config_hash, checkpoint, metric = (
        text_of(path, name, arrays[name], fix=_FIX) for name in ("config_hash", "checkpoint", "metric")
    )
    if metric not in ("cosine", "euclidean"):
        raise DataError(f"{path}: expected the metric to be cosine or euclidean, got {metric!r:.50}.\n  fix: {_FIX}")
    model = ModelId(matrix.shape[1], metric, config_hash, checkpoint)
    return Features(path, matrix, ImageColumns(**own, further=further), model, fingerprint)


def write_features(features: Features) -> None:
    """Write features to the file ``features.path``, see ``read_features``.

    Raises:
        WriteError: if the file cannot be written.
    """
    images, model, matrix = features.images, features.model, features.matrix
    own = {name: getattr(images, name) for name in OWN_COLUMNS}
    arrays = {name: values for name, values in own.items() if values is not None}
    arrays |= {COLUMN_PREFIX + name: values for name, values in images.further.items()}
    arrays |= {name: np.array(getattr(model, name)) for name in ("config_hash", "checkpoint", "metric")}
    blocks = (matrix[start : start + _BLOCK] for start in range(0, len(matrix), _BLOCK))
    shape = (len(matrix), matrix.shape[1])
    write_atomically(features.path, lambda file: write_arrays(file, arrays, blocks, shape))


def _check_columns(path: Path, own: Mapping[str, np.ndarray], further: Mapping[str, np.ndarray], count: int) -> None:
    """Validate columns that describe ``count`` images.

    Raises:
        DataError: if a column has a wrong shape or dtype.
    """
    for name, (kinds, shape) in _COLUMNS.items():
        if name not in own:
            continue
        array, sizes = own[name], tuple(count if size == "N" else size for size in shape)
        if array.shape != sizes or array.dtype.kind not in kinds:
            expected = " or ".join({"U": "text", "i": "integers", "u": ""}[kind] for kind in kinds if kind != "u")
            raise DataError(
                f"{path}: {name} does not match {count} features: expected {expected} {sizes}, got {array.dtype} "
                f"{array.shape}.\n  fix: {_FIX}"
            )
    for name, array in further.items():
        if array.shape[:1] != (count,) or array.ndim > 2 or array.dtype.kind not in "iufU":
            raise DataError(
                f"{path}: the column {name} does not match {count} features: expected numbers or text ({count},), or "
                f"numbers ({count}, L), got {array.dtype} {array.shape}.\n  fix: {_FIX}"
            )
