"""File format of extractions: npz files of plain arrays, whose features are memory-mapped."""

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.utils.env import available_memory
from fastamp.utils.errors import DataError, UserError
from fastamp.utils.files import FORMAT_KEY, check_format, check_not_device

FORMAT = 1
"""Number of the format of extractions and indices; a change that earlier releases cannot read increases it."""
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
_WRITE_AGAIN = "create the file with fastamp extract"
_NOT_PLAIN = 0x61  # flags of encrypted or patched zip entries
_LOCAL_HEADER = 30  # size in bytes of a local zip header without name and extra field


@dataclass(frozen=True)
class Extraction:
    """Features of N images, with identities and cameras.

    Attributes:
        path: npz file of the extraction.
        features: (N, D) float32, not normalized, memory-mapped.
        paths: (N,) str, paths of the image files.
        pids: (N,) int64 or str, identities as named in the dataset; -1 if unknown.
        camids: (N,) int64, cameras; -1 if unknown.
        config_hash: hash of the model, see ``Predictor.config_hash``.
        checkpoint: path of the model's checkpoint.
        metric: ``TEST.METRIC`` in the model's config.
        split: (N,) str, ``query``, ``gallery`` or ``train``; None without splits.
        boxes: (N, 4) int64, box of each image in its file: left, top, right, bottom (right and bottom exclusive);
            None if each image is an entire file.
        cameras: (N,) str, cameras as named in the dataset; None if they have no names besides ``camids``.
        fingerprint: checksum of features, paths and further columns.
        columns: further columns of the dataset: name -> (N,) int64, float64 or str, or (N, L) numbers. A missing value
            is -1, NaN or "". Models with attributes add their probabilities, ``probability.NAME`` -> (N,) float32.
    """

    path: Path
    features: np.ndarray
    paths: np.ndarray
    pids: np.ndarray
    camids: np.ndarray
    config_hash: str
    checkpoint: str
    metric: str
    split: np.ndarray | None = None
    boxes: np.ndarray | None = None
    fingerprint: str = ""
    cameras: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


def is_unknown(labels: np.ndarray) -> bool:
    """Return True if the identities or cameras of all images are unknown, i.e. -1."""
    return labels.dtype.kind in "iu" and bool((labels == -1).all())


def write_arrays(
    file: IO[bytes],
    arrays: Mapping[str, np.ndarray],
    features: Iterable[np.ndarray] | None = None,
    shape: tuple[int, int] = (0, 0),
) -> None:
    """Write a deterministic, uncompressed npz file, with the number of its format.

    Args:
        file: binary file opened for writing; the archive is written after data that the file already contains.
        arrays: name -> array.
        features: row blocks of an additional float32 array ``features``; only one block is in memory at a time.
            Default: None, no features.
        shape: shape of ``features``.
    """
    with zipfile.ZipFile(file, "w") as archive:
        if features is not None:
            with archive.open(zipfile.ZipInfo("features.npy"), "w", force_zip64=True) as stream:
                header = {"descr": "<f4", "fortran_order": False, "shape": tuple(map(int, shape))}
                np.lib.format.write_array_header_1_0(stream, header)
                for block in features:
                    stream.write(np.ascontiguousarray(block, dtype="<f4").data)
        for name, array in ({FORMAT_KEY: np.array(FORMAT)} | {**arrays}).items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asanyarray(array), allow_pickle=False)


@contextmanager
def open_arrays(path: str | PathLike[str], expected: str, *, fix: str) -> Iterator[zipfile.ZipFile]:
    """Open an npz file for ``read_array`` and ``map_array``, and convert exceptions in the context to DataError.

    Args:
        path: npz file.
        expected: expected kind of file for the error message, e.g. ``"extraction"``.
        fix: suggested fix for the error message if the file is damaged.

    Raises:
        DataError: if the file cannot be read, is damaged or encrypted, uses an unsupported compression, its unpacked
            size exceeds the available memory, or its format is that of a later version of fastamp.
    """
    try:
        check_not_device(path)
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED)
            free = available_memory()
            if free is not None and size > free:
                raise DataError(
                    f"{path} is too large: its unpacked size is {size / 1e9:.1f} GB, but only "
                    f"{free / 1e9:.1f} GB of memory are available.\n"
                    "  fix: free memory, or use a machine with more memory"
                )
            if f"{FORMAT_KEY}.npy" in archive.namelist():  # not in files of other programs
                stored = read_array(archive, FORMAT_KEY)
                check_format(stored.item() if stored.shape == () else stored.shape, FORMAT, path, DataError)
            yield archive
    except (UserError, AssertionError, AttributeError, ImportError, NameError):  # all except UserError are bugs
        raise
    except OSError as error:
        if error.strerror is None:  # not from the system but from decompression, e.g. bz2
            raise _damaged_error(path, expected, error, fix) from error
        raise DataError(f"cannot read {path}: {error.strerror}.\n  fix: check the path and its permissions") from error
    except Exception as error:  # zipfile and NumPy raise many exception types for damaged files
        raise _damaged_error(path, expected, error, fix) from error


def _damaged_error(path: str | PathLike[str], expected: str, error: Exception, fix: str) -> DataError:
    lines = str(error).splitlines() or [""]
    cause = (
        lines[0][:200] if lines[0] and not isinstance(error, KeyError) else f"{type(error).__name__} {lines[0]:.200}"
    )
    fault = f"{path} is damaged or is not an {expected} ({cause})"
    if not Path(path).stat().st_size:
        fault = f"{path}: the file is empty"
    return DataError(f"{fault}.\n  fix: {fix}")


def check_columns(path: str | PathLike[str], arrays: Mapping[str, np.ndarray], count: int, *, fix: str) -> None:
    """Validate columns that describe ``count`` images.

    Raises:
        DataError: if a column has a wrong shape or dtype.
    """
    for name, (kinds, shape) in _COLUMNS.items():
        if name not in arrays:
            continue
        array, sizes = arrays[name], tuple(count if size == "N" else size for size in shape)
        if array.shape != sizes or array.dtype.kind not in kinds:
            expected = " or ".join({"U": "text", "i": "integers", "u": ""}[kind] for kind in kinds if kind != "u")
            raise DataError(
                f"{path}: {name} does not match {count} features: expected {expected} {sizes}, got {array.dtype} "
                f"{array.shape}.\n  fix: {fix}"
            )
    for name, array in further_columns(arrays).items():
        if array.shape[:1] != (count,) or array.ndim > 2 or array.dtype.kind not in "iufU":
            raise DataError(
                f"{path}: the column {name} does not match {count} features: expected numbers or text ({count},), or "
                f"numbers ({count}, L), got {array.dtype} {array.shape}.\n  fix: {fix}"
            )


def text_of(path: str | PathLike[str], name: str, array: np.ndarray, *, fix: str) -> str:
    """Convert a 0-dimensional string array to str.

    Raises:
        DataError: if the array is not a 0-dimensional string array.
    """
    if array.shape != () or array.dtype.kind != "U":
        raise DataError(
            f"{path}: expected {name} to be a single string, got {array.dtype} {array.shape}.\n  fix: {fix}"
        )
    return str(array)


def read_extraction(path: str | PathLike[str]) -> Extraction:
    """Read a file that ``fastamp extract`` wrote.

    Args:
        path: npz file of the extraction.

    Returns:
        The extraction, with memory-mapped features.

    Raises:
        DataError: if the file is missing, is damaged or is not an extraction.
    """
    path = Path(path).expanduser()
    with open_arrays(path, "extraction", fix=_WRITE_AGAIN) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        missing = [name for name in _EXPECTED if name not in names]
        if missing:
            raise DataError(
                f"{path} is not an extraction: missing arrays {', '.join(missing)}.\n  found: {', '.join(names)}\n"
                f"  fix: {_WRITE_AGAIN}"
            )
        column_names = [name for name in names if name.startswith(COLUMN_PREFIX)]
        known = [name for name in names if name in {*_EXPECTED, *_COLUMNS}]
        arrays = {name: map_array(archive, name) for name in [*known, *column_names]}
        summed = ("features", "paths", *sorted(column_names))
        fingerprint = "-".join(f"{archive.getinfo(f'{name}.npy').CRC:08x}" for name in summed)
    features = arrays["features"]
    if features.ndim != 2 or features.dtype != np.float32:
        raise DataError(
            f"{path}: expected float32 features of shape (N, D), got {features.dtype} {features.shape}.\n"
            f"  fix: {_WRITE_AGAIN}"
        )
    if 0 in features.shape:
        raise DataError(
            f"{path} contains no features: expected shape (N, D) with N and D at least 1, got {features.shape}.\n"
            f"  fix: {_WRITE_AGAIN}"
        )
    check_columns(path, arrays, len(features), fix=_WRITE_AGAIN)
    rows: dict[str, Any] = {name: arrays[name] for name in _COLUMNS if name in arrays}
    texts: dict[str, Any] = {
        name: text_of(path, name, arrays[name], fix=_WRITE_AGAIN) for name in ("config_hash", "checkpoint", "metric")
    }
    columns = further_columns(arrays)
    return Extraction(path=path, features=features, **rows, **texts, fingerprint=fingerprint, columns=columns)


def further_columns(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of further columns, under the names of the columns."""
    return {name.removeprefix(COLUMN_PREFIX): array for name, array in arrays.items() if name.startswith(COLUMN_PREFIX)}


def has_missing_integers(column: np.ndarray) -> bool:
    """Return True if -1 is a missing value in a column of an extraction: its values are integers, the lowest is -1."""
    return column.dtype.kind in "iu" and len(column) > 0 and int(column.min()) == -1


def check_same_model(gallery: Any, config_hash: str, checkpoint: str | PathLike[str]) -> None:
    """Check that the features of a model can be compared with those in ``gallery``.

    Args:
        gallery: extraction or index, with ``path``, ``config_hash`` and ``checkpoint``.
        config_hash, checkpoint: hash of the model, and path of its checkpoint.

    Raises:
        DataError: if the hashes differ.
    """
    if config_hash != gallery.config_hash:
        raise DataError(
            f"model mismatch: the features in {gallery.path} were extracted with a different model.\n"
            f"  file:  {gallery.checkpoint} ({gallery.config_hash})\n"
            f"  model: {checkpoint} ({config_hash})\n"
            "  fix: use the model that extracted the features, or extract them again with this model"
        )


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read an array from an npz file.

    Raises:
        ValueError: if the shape and dtype do not match the number of bytes.
    """
    entry = archive.getinfo(f"{name}.npy")
    with archive.open(entry) as stream:
        shape, _, dtype = _read_header(stream)
        _check_bytes(name, shape, dtype, entry.file_size - stream.tell())
    with archive.open(entry) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _check_bytes(name: str, shape: tuple[int, ...], dtype: np.dtype, size: int) -> None:
    """Raise ValueError unless ``size`` is the number of bytes of an array with this shape and dtype."""
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name}: the header specifies {dtype} {shape}, but the data has {size} bytes")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the shape, the Fortran-order flag and the dtype from the header of an array."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"unsupported npy version {version}; expected (1, 0) or (2, 0)")
    return read(stream)


def map_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Memory-map an array in an npz file; an array that cannot be mapped (e.g. compressed) is read into memory.

    Raises:
        ValueError: if the shape and dtype do not match the number of bytes.
    """
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _NOT_PLAIN:
        return read_array(archive, name)
    assert archive.filename is not None  # it is not a stream
    with open(archive.filename, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER)
        start = file.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), 1)
        shape, fortran_order, dtype = _read_header(file)
        _check_bytes(name, shape, dtype, entry.file_size - (file.tell() - start))
        if fortran_order or dtype.hasobject or not shape or 0 in shape:
            return read_array(archive, name)
        return np.memmap(file, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
