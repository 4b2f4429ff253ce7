"""npz files of plain arrays, whose arrays can be memory-mapped."""

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO

import numpy as np

from fastamp.utils.env import available_memory
from fastamp.utils.errors import DataError, UserError
from fastamp.utils.files import FORMAT_KEY, check_format, check_not_device

FORMAT = 1
"""Number of the format of extractions and indices; a change that earlier releases cannot read increases it."""
_NOT_PLAIN = 0x61  # flags of encrypted or patched zip entries
_LOCAL_HEADER = 30  # size in bytes of a local zip header without name and extra field


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
    cause = str(error).partition("\n")[0][:200]
    if not cause or isinstance(error, KeyError):
        cause = f"{type(error).__name__} {cause}"
    fault = f"{path} is damaged or is not an {expected} ({cause})"
    if not Path(path).stat().st_size:
        fault = f"{path}: the file is empty"
    return DataError(f"{fault}.\n  fix: {fix}")


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
