"""What an extraction is on disk: one npz file of plain arrays, whose features are read where they lie."""

import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.utils.errors import DataError

_EXPECTED = ("features", "paths", "pids", "camids", "config_hash", "checkpoint", "metric")
# What damaged archives and arrays make zipfile and NumPy raise.
DAMAGE = (zipfile.BadZipFile, ValueError, EOFError, SyntaxError, KeyError, tokenize.TokenError, zlib.error)
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


def read_extraction(path: str | PathLike[str]) -> Extraction:
    """Return what ``fastamp extract`` wrote.

    Raises:
        DataError: there is no such file, it is damaged, or it is no extraction.
    """
    path = Path(path).expanduser()
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            missing = [name for name in _EXPECTED if name not in names]
            if missing:
                raise DataError(
                    f"{path} is no extraction: it has no {', '.join(missing)}.\n  found: {', '.join(names)}\n"
                    "  fix: fastamp extract writes one"
                )
            arrays = {name: mapped_array(archive, name) for name in names}
            fingerprint = "-".join(f"{archive.getinfo(f'{name}.npy').CRC:08x}" for name in ("features", "paths"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except DAMAGE as error:
        raise DataError(f"{path} is damaged or no extraction ({error}).\n  fix: fastamp extract writes one") from error
    features = arrays["features"]
    rows = {name: arrays[name] for name in ("paths", "pids", "camids", "split", "boxes") if name in arrays}
    if features.ndim != 2 or features.dtype != np.float32 or any(len(each) != len(features) for each in rows.values()):
        found = ", ".join(f"{len(each)} {name}" for name, each in rows.items())
        raise DataError(f"{path}: features {features.shape} {features.dtype}, and {found}; expected (N, D) float32")
    if len(features) == 0:
        raise DataError(f"{path} has no features")
    texts = {name: str(arrays[name]) for name in ("config_hash", "checkpoint", "metric")}
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
    """Return an array of an npz file."""
    with archive.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def mapped_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of an npz file as it lies there, of which only what is used is in memory; else it is read."""
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED:
        return read_array(archive, name)
    with open(archive.filename, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER)
        file.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), 1)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(file)
        if fortran_order or dtype.hasobject or not shape or 0 in shape:
            return read_array(archive, name)
        return np.memmap(file, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
