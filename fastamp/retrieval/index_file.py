"""File of an index: the faiss index, which can be memory-mapped, and then an npz archive that names its features."""

import os
import zlib
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.retrieval.indices import INDEX_REGISTRY, Index, faiss_metric
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.npz import open_arrays, read_array, text_of, write_arrays
from fastamp.utils.errors import ConfigError, DataError, writing
from fastamp.utils.files import write_atomically

_FIX = "delete the file, and build the index again"


def write_index(path: Path, index: Index, fingerprint: str, **arrays: np.ndarray) -> None:
    """Write an index atomically.

    Args:
        path: file to write.
        index: index to write.
        fingerprint: fingerprint of the features.
        arrays: further arrays, name -> array.

    Raises:
        ConfigError: if the file cannot be written.
    """
    with writing(path):
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(
                f"cannot write the index to {path}: expected a file in an existing folder.\n"
                "  fix: choose another file, or create the folder"
            )
        entries = {"kind": np.array(index.kind), "fingerprint": np.array(fingerprint)}
        entries |= {"effort": np.array(index.effort or 0), "recall": np.array(index.recall)}
        write_atomically(path, lambda file: _write(file, index.faiss, entries | arrays))


def _write(file: IO[bytes], index: Any, arrays: dict[str, np.ndarray]) -> None:
    import faiss

    crc, failures = 0, []

    def write(part: bytes) -> int:
        nonlocal crc
        crc = zlib.crc32(part, crc)
        try:
            return file.write(part)
        except OSError as error:
            failures.append(error)
            raise

    try:
        faiss.write_index(index, faiss.PyCallbackIOWriter(write, 2**24))
    except Exception as error:
        raise (failures[0] if failures else error) from None
    write_arrays(file, arrays | {"size": np.array(file.tell()), "crc": np.array(crc)})


def read_texts(path: Path) -> dict[str, str]:
    """Read the texts of an index file: ``kind``, ``fingerprint`` and, if stored, ``features``.

    Raises:
        DataError: if the file is missing or damaged, or is not an index.
    """
    with open_arrays(path, "index", fix=_FIX) as archive:
        names = [name for name in ("kind", "fingerprint", "features") if f"{name}.npy" in archive.namelist()]
        return {name: text_of(path, name, read_array(archive, name), fix=_FIX) for name in names}


def read_index(
    path: str | PathLike[str], model: ModelId, fingerprint: str, *, mapped: bool = True
) -> tuple[Index, dict[str, np.ndarray]]:
    """Read an index of features.

    The entire file is read to verify its checksum, because faiss crashes on invalid data.

    Args:
        path: file written by ``write_index``.
        model: model of the features.
        fingerprint: fingerprint of the features.
        mapped: if True, map the file into memory; the index cannot be changed. Default: True.

    Returns:
        The index, and all arrays of the file.

    Raises:
        DataError: if the file is missing or damaged, or is not an index of features with this fingerprint and model.
    """
    import faiss

    path = Path(path).expanduser()
    texts = read_texts(path)
    with open_arrays(path, "index", fix=_FIX) as archive:
        if record := archive.testzip():
            raise ValueError(f"checksum mismatch in {record}")
        arrays = {name.removesuffix(".npy"): read_array(archive, name[:-4]) for name in archive.namelist()}
        size, crc, effort, recall = (arrays[name].item() for name in ("size", "crc", "effort", "recall"))
        if not isinstance(size, int) or size < 0 or _checksum(path, size) != crc:
            raise ValueError("checksum mismatch in the faiss index")
        if not isinstance(effort, int) or effort < 0 or not (0 <= recall <= 1 or recall != recall):
            raise ValueError(f"invalid numbers: effort {effort}, recall {recall}")
        # Older versions of faiss map only the lists of an IVF index, and read other kinds into memory.
        flags = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) if mapped else 0
        index = faiss.read_index(os.fspath(path), flags)
        kind = INDEX_REGISTRY.get(texts["kind"]) if texts["kind"] in INDEX_REGISTRY else None
        if texts["fingerprint"] != fingerprint:
            raise DataError(f"{path} is the index of another gallery.\n  fix: {_FIX}")
    if kind is None:
        raise DataError(
            f"{path} is an index of the kind {texts['kind']!r}, which is not registered.\n"
            f"  fix: register it, e.g. with --plugin; or {_FIX}"
        )
    if type(index).__name__ != kind.faiss_class or index.d != model.width or not _fits(index, model):
        raise DataError(
            f"{path} does not match its features: expected kind {texts['kind']!r}, metric {model.metric!r} and "
            f"dimension {model.width}, got {type(index).__name__} with faiss metric {index.metric_type} and dimension "
            f"{index.d}.\n  fix: {_FIX}"
        )
    return kind(index, effort or None, float(recall)), arrays


def _fits(index: Any, model: ModelId) -> bool:
    """Return True if a faiss index is for the metric; product codes of normalized features may be Euclidean."""
    return type(index).__name__ == "IndexIVFPQFastScan" or index.metric_type == faiss_metric(model.metric)


def _checksum(path: Path, size: int) -> int:
    crc = 0
    with path.open("rb") as file:
        while size and (part := file.read(min(size, 2**24))):
            size -= len(part)
            crc = zlib.crc32(part, crc)
    return crc
