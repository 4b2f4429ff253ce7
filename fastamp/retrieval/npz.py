"""npz files of plain arrays, whose arrays can be memory-mapped."""

import math
import zipfile
from collections.abc import Iterator, Mapping
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


def write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a deterministic, uncompressed npz file, with the number of its format.

    Args:
        file: binary file opened for writing; the archive is written after data that the file already contains.
        arrays: name -> array; a memory-mapped one is not read into memory.
    """
    with zipfile.ZipFile(file, "w") as archive:
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
    except Exception as error:  # zipfile and NumPy raise many exception types for damaged files
        if isinstance(error, OSError) and error.strerror:  # of the system; decompression, e.g. bz2, states no reason
            raise DataError(
                f"cannot read {path}: {error.strerror}.\n  fix: check the path and its permissions"
            ) from error
        cause = str(error).partition("\n")[0][:200]
        if not cause or isinstance(error, KeyError):
            cause = f"{type(error).__name__} {cause}"
        fault = f"{path} is damaged or is not an {expected} ({cause})"
        if not Path(path).stat().st_size:
            fault = f"{path}: the file is empty"
        raise DataError(f"{fault}.\n  fix: {fix}") from error


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read an array from an npz file.

    Raises:
        ValueError: if the array is missing, or its shape and dtype do not match the number of bytes.
    """
    entry = _entry(archive, name)
    with archive.open(entry) as stream:
        _read_header(stream, entry)
    with archive.open(entry) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    if f"{name}.npy" not in archive.namelist():
        raise ValueError(f"it has no array {name}")
    return archive.getinfo(f"{name}.npy")


def _read_header(stream: IO[bytes], entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the shape, the Fortran-order flag and the dtype from the header of an array, at the start of an entry.

    Raises:
        ValueError: if the array is missing, or its shape and dtype do not match the number of bytes.
    """
    start = stream.tell()
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"unsupported npy version {version}; expected (1, 0) or (2, 0)")
    shape, fortran_order, dtype = read(stream)
    size = entry.file_size - (stream.tell() - start)
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{entry.filename}: the header specifies {dtype} {shape}, but the data has {size} bytes")
    return shape, fortran_order, dtype


def map_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Memory-map an array in an npz file; an array that cannot be mapped (e.g. compressed) is read into memory.

    Raises:
        ValueError: if the array is missing, or its shape and dtype do not match the number of bytes.
    """
    entry = _entry(archive, name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _NOT_PLAIN:
        return read_array(archive, name)
    assert archive.filename is not None  # it is not a stream
    with open(archive.filename, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER)
        file.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), 1)
        shape, fortran_order, dtype = _read_header(file, entry)
        if fortran_order or dtype.hasobject or not shape or 0 in shape:
            return read_array(archive, name)
        return np.memmap(file, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
