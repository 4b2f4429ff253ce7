"""File of an index: the faiss index, which can be memory-mapped, and then an npz archive that names its features."""

import os
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.retrieval.gallery import Gallery
from fastamp.retrieval.indices import INDEX_REGISTRY, Index
from fastamp.retrieval.npz import open_arrays, read_array, write_arrays
from fastamp.utils.errors import DataError
from fastamp.utils.files import write_atomically

_FIX = "delete the file, and build the index again"
# Entries of the archive and their types; the checksum is that of the first ``size`` bytes, the faiss index.
_HEADER = {"kind": str, "fingerprint": str, "features": str, "effort": int, "recall": float, "size": int, "crc": int}


def write_index(path: Path, index: Index, gallery: Gallery) -> None:
    """Write an index of the features of a gallery atomically.

    Raises:
        WriteError: if the file cannot be written.
    """
    header = {"kind": index.kind, "fingerprint": gallery.fingerprint, "features": gallery.path.name}
    numbers = {"effort": index.effort or 0, "recall": float(index.recall)}
    write_atomically(path, lambda file: _write(file, index.faiss, header | numbers))


def _write(file: IO[bytes], index: Any, header: dict[str, Any]) -> None:
    import faiss

    crc = 0

    def write(part: bytes) -> int:
        nonlocal crc
        crc = zlib.crc32(part, crc)
        return file.write(part)

    faiss.write_index(index, faiss.PyCallbackIOWriter(write, 2**24))
    header |= {"size": file.tell(), "crc": crc}
    write_arrays(file, {name: np.array(value) for name, value in header.items()})


def read_header(path: Path) -> dict[str, Any]:
    """Read the entries of an index file other than the faiss index, see ``_HEADER``.

    Raises:
        DataError: if the file is missing or damaged, or is not an index.
    """
    with open_arrays(path, "index", fix=_FIX) as archive:
        header = {name: read_array(archive, name).item() for name in _HEADER}
        wrong = [name for name, kind in _HEADER.items() if not isinstance(header[name], kind)]
        effort, recall = header["effort"], header["recall"]
        if wrong or effort < 0 or not (0 <= recall <= 1 or recall != recall):
            raise ValueError(f"invalid {', '.join(wrong) or f'numbers: effort {effort}, recall {recall}'}")
    return header


def read_index(path: Path, gallery: Gallery, *, mapped: bool = True) -> Index:
    """Read an index of the features of a gallery.

    The entire file is read to verify its checksum, because faiss crashes on invalid data.

    Args:
        path: file written by ``write_index``.
        gallery: gallery of the features.
        mapped: if True, map the file into memory; the index cannot be changed. Default: True.

    Raises:
        DataError: if the file is missing or damaged, or is not an index of features with this fingerprint.
    """
    import faiss

    header = read_header(path)
    if header["fingerprint"] != gallery.fingerprint:
        raise DataError(f"{path} is the index of another gallery.\n  fix: {_FIX}")
    if header["kind"] not in INDEX_REGISTRY:
        raise DataError(
            f"{path} is an index of the kind {header['kind']!r}, which is not registered.\n"
            f"  fix: register this kind, e.g. with --plugin; or {_FIX}"
        )
    with open_arrays(path, "index", fix=_FIX):
        if zlib.crc32(np.memmap(path, np.uint8, "r", shape=header["size"]).data) != header["crc"]:
            raise ValueError("checksum mismatch in the faiss index")
        # Older versions of faiss map only the lists of an IVF index, and read other kinds into memory.
        flags = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP) if mapped else 0
        index = faiss.read_index(os.fspath(path), flags)
    kind: type[Index] = INDEX_REGISTRY.get(header["kind"])
    if type(index).__name__ != kind.faiss_class or index.d != gallery.model.width:
        raise DataError(
            f"{path} does not match its features: expected kind {header['kind']!r} and dimension "
            f"{gallery.model.width}, got {type(index).__name__} of dimension {index.d}.\n"
            f"  fix: {_FIX}"
        )
    return kind(index, header["effort"] or None, header["recall"])
