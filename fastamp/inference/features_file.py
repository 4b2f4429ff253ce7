"""What an extraction is on disk: one npz file of plain arrays, whose features are read where they lie."""

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.utils.env import available_memory
from fastamp.utils.errors import DataError, UserError
from fastamp.utils.files import check_not_device
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "mapped_array": "fastamp.inference.features_file.map_array",
    },
)

_EXPECTED = ("features", "paths", "pids", "camids", "config_hash", "checkpoint", "metric")
# Column -> kinds of its dtype, and its shape: N stands for the number of images.
_COLUMNS: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "paths": ("U", ("N",)),
    "pids": ("iuU", ("N",)),
    "camids": ("iu", ("N",)),
    "split": ("U", ("N",)),
    "boxes": ("iu", ("N", 4)),
}
_WRITE_AGAIN = "fastamp extract writes one"
_NOT_PLAIN = 0x61  # flags of a zip entry that is encrypted or a patch
_LOCAL_HEADER = 30  # bytes of a zip entry's own header, before its name and its extra field


@dataclass(frozen=True)
class Extraction:
    """The features of N images, and whose they are.

    Attributes:
        path: of the file.
        features: (N, D) float32, not normalized; mapped, so that only what is used is in memory.
        paths: (N,) text, the image files.
        pids: (N,) int64 or text, the identities as the data set calls them; -1 where they are not known.
        camids: (N,) int64, the cameras; -1 where they are not known.
        config_hash: of the model, see ``Predictor.config_hash``.
        checkpoint: the model's file.
        metric: the model's ``TEST.METRIC``.
        split: (N,) text, ``query``, ``gallery`` or ``train``; None where there are no splits.
        boxes: (N, 4) int64, the part of the file that is the image: left, top, right, bottom, the last two not
            included; None where all are whole.
        fingerprint: differs between extractions.
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


def write_arrays(
    file: IO[bytes],
    arrays: Mapping[str, np.ndarray],
    features: Iterable[np.ndarray] | None = None,
    shape: tuple[int, int] = (0, 0),
) -> None:
    """Write an npz file, not compressed; the same bytes for the same arrays.

    Args:
        file: open for writing, possibly behind other content.
        arrays: by name.
        features: the rows of one more array, ``features``, float32, in blocks of which one at a time is held.
        shape: of all of ``features``.
    """
    with zipfile.ZipFile(file, "w") as archive:
        if features is not None:
            with archive.open(zipfile.ZipInfo("features.npy"), "w", force_zip64=True) as stream:
                header = {"descr": "<f4", "fortran_order": False, "shape": tuple(map(int, shape))}
                np.lib.format.write_array_header_1_0(stream, header)
                for block in features:
                    stream.write(np.ascontiguousarray(block, dtype="<f4").data)
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asanyarray(array), allow_pickle=False)


@contextmanager
def open_arrays(path: str | PathLike[str], expected: str, *, fix: str) -> Iterator[zipfile.ZipFile]:
    """Open an npz file, for ``read_array`` and ``map_array`` inside the context.

    Args:
        path: the file.
        expected: what it should be, for the message: ``extraction``.
        fix: what to do about a damaged one, for the message.

    Raises:
        DataError: inside the context too: the file cannot be read, is damaged, compressed or encrypted in a way that
            is not supported, or is larger than the memory when it is unpacked.
    """
    try:
        check_not_device(path)
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED)
            free = available_memory()
            if free is not None and size > free:
                raise DataError(f"{path} unpacks to {size / 1e9:.1f} GB; {free / 1e9:.1f} GB of memory are available")
            yield archive
    except (UserError, AssertionError, AttributeError, ImportError, NameError):  # all but the first are bugs
        raise
    except OSError as error:
        if error.strerror is None:  # not the system's, but about the content, e.g. of bz2
            raise _damaged_error(path, expected, error, fix) from error
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # damaged bytes make zipfile and NumPy raise nearly anything
        raise _damaged_error(path, expected, error, fix) from error


def _damaged_error(path: str | PathLike[str], expected: str, error: Exception, fix: str) -> DataError:
    lines = str(error).splitlines() or [""]
    cause = (
        lines[0][:200] if lines[0] and not isinstance(error, KeyError) else f"{type(error).__name__} {lines[0]:.200}"
    )
    return DataError(f"{path} is damaged, or not an {expected} ({cause}).\n  fix: {fix}")


def check_columns(path: str | PathLike[str], arrays: Mapping[str, np.ndarray], count: int, *, fix: str) -> None:
    """Check the columns of ``count`` images.

    Raises:
        DataError: one has another length, shape or dtype.
    """
    for name, (kinds, shape) in _COLUMNS.items():
        if name not in arrays:
            continue
        array, sizes = arrays[name], tuple(count if size == "N" else size for size in shape)
        if array.shape != sizes or array.dtype.kind not in kinds:
            expected = " or ".join({"U": "text", "i": "integers", "u": ""}[kind] for kind in kinds if kind != "u")
            raise DataError(
                f"{path}: {name} are {array.dtype} {array.shape}; expected {expected} {sizes}, as there are {count} "
                f"features.\n  fix: {fix}"
            )


def text_of(path: str | PathLike[str], name: str, array: np.ndarray, *, fix: str) -> str:
    """Return an array () of text as text.

    Raises:
        DataError: it is another array.
    """
    if array.shape != () or array.dtype.kind != "U":
        raise DataError(f"{path}: {name} is {array.dtype} {array.shape}; expected a single text.\n  fix: {fix}")
    return str(array)


def read_extraction(path: str | PathLike[str]) -> Extraction:
    """Return what ``fastamp extract`` wrote.

    Raises:
        DataError: there is no such file, it is damaged, or it is no extraction.
    """
    path = Path(path).expanduser()
    with open_arrays(path, "extraction", fix=_WRITE_AGAIN) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        missing = [name for name in _EXPECTED if name not in names]
        if missing:
            raise DataError(
                f"{path} is no extraction: it has no {', '.join(missing)}.\n  found: {', '.join(names)}\n"
                f"  fix: {_WRITE_AGAIN}"
            )
        known = [name for name in names if name in {*_EXPECTED, *_COLUMNS}]
        arrays = {name: map_array(archive, name) for name in known}
        fingerprint = "-".join(f"{archive.getinfo(f'{name}.npy').CRC:08x}" for name in ("features", "paths"))
    features = arrays["features"]
    if features.ndim != 2 or features.dtype != np.float32:
        raise DataError(f"{path}: features are {features.dtype} {features.shape}; expected float32 (N, D)")
    if 0 in features.shape:
        raise DataError(f"{path} has no features: {features.shape}")
    check_columns(path, arrays, len(features), fix=_WRITE_AGAIN)
    rows = {name: arrays[name] for name in _COLUMNS if name in arrays}
    texts = {
        name: text_of(path, name, arrays[name], fix=_WRITE_AGAIN) for name in ("config_hash", "checkpoint", "metric")
    }
    return Extraction(path=path, features=features, **rows, **texts, fingerprint=fingerprint)


def check_same_model(gallery: Any, config_hash: str, checkpoint: str | PathLike[str]) -> None:
    """Check that features of a model can be compared with those of ``gallery``.

    Args:
        gallery: an extraction or an index, with ``path``, ``config_hash`` and ``checkpoint``.
        config_hash, checkpoint: of the model.

    Raises:
        DataError: they are of different models.
    """
    if config_hash != gallery.config_hash:
        raise DataError(
            f"{gallery.path} is of another model, so that the features cannot be compared.\n"
            f"  it is of:   {gallery.checkpoint} ({gallery.config_hash})\n"
            f"  the images: {checkpoint} ({config_hash})\n"
            "  fix: use that model, or extract with this one"
        )


def read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of an npz file.

    Raises:
        ValueError: its shape and dtype need more or fewer bytes than the file holds of it.
    """
    entry = archive.getinfo(f"{name}.npy")
    with archive.open(entry) as stream:
        shape, _, dtype = _read_header(stream)
        _check_bytes(name, shape, dtype, entry.file_size - stream.tell())
    with archive.open(entry) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _check_bytes(name: str, shape: tuple[int, ...], dtype: np.dtype, found: int) -> None:
    """Raise ValueError unless an array of this shape and dtype has as many bytes as were found."""
    if math.prod(shape) * dtype.itemsize != found:
        raise ValueError(f"{name} claims to be {shape} {dtype}, but has {found} bytes")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, whether it is in Fortran's order, and the dtype of the array that begins in a stream."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"its arrays are of version {version} of the format; (1, 0) and (2, 0) can be read")
    return read(stream)


def map_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of an npz file as it lies there, of which only what is used is in memory; else it is read.

    Raises:
        ValueError: see ``read_array``.
    """
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _NOT_PLAIN:
        return read_array(archive, name)
    with open(archive.filename, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER)
        start = file.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), 1)
        shape, fortran_order, dtype = _read_header(file)
        _check_bytes(name, shape, dtype, entry.file_size - (file.tell() - start))
        if fortran_order or dtype.hasobject or not shape or 0 in shape:
            return read_array(archive, name)
        return np.memmap(file, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
