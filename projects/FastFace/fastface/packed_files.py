"""Readers of packed face images: RecordIO files of MXNet, and the ``.bin`` files of insightface's test sets."""

import io
import math
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fastamp.utils.errors import DataError

_MAGIC = 0xCED7230A
_HEADER = struct.Struct("<IfQQ")
# Upper three bits of a part's length: a whole record, or the first, a middle or the last part of one.
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


def read_index(path: Path) -> dict[int, int]:
    """Read the offset of each record from an ``.idx`` file, whose lines are the number and the offset of a record.

    Raises:
        DataError: if the file is empty or cannot be read, or a line is invalid.
    """
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        index = {int(number): int(offset) for number, offset in rows}
        if min((min(row) for row in index.items()), default=-1) < 0:
            raise ValueError("expected numbers and offsets of records, at least 0" if index else "it is empty")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path.absolute()}: {error}.\n  fix: restore this file of the dataset") from error
    return index


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read the identity and the encoded image of each record of a ``.rec`` file with an ``.idx`` file next to it.

    Record 0 of insightface's files has no image: its label is the number of the first record without an image.

    Raises:
        DataError: if a file cannot be read, or a record is truncated or damaged.
    """
    index = read_index(path.with_suffix(".idx"))
    with _open(path) as file:
        labels, image = _record(file, path, index, min(index))
        numbers = sorted(index)
        if not image:
            numbers = [number for number in numbers[1:] if number < labels[0]]
        for number in numbers:
            labels, image = _record(file, path, index, number)
            if not image:
                raise _damaged(path, number, "has no image")
            yield int(labels[0]), image


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"cannot read {path.absolute()}: {error.strerror or error}.\n  fix: correct the path"
        ) from error


def _record(file: io.BufferedReader, path: Path, index: dict[int, int], number: int) -> tuple[np.ndarray, bytes]:
    """Return the labels, (L,) float32 with L >= 1, and the image of a record."""
    content = _content(file, path, index[number], number)
    if len(content) < _HEADER.size:
        raise _damaged(path, number)
    count, label, *_ = _HEADER.unpack_from(content)
    end = _HEADER.size + 4 * count
    if end > len(content):
        raise _damaged(path, number)
    labels = np.frombuffer(content[_HEADER.size : end], dtype="<f4") if count else np.array([label], dtype=np.float32)
    if not math.isfinite(labels[0]):
        raise _damaged(path, number, f"has the label {labels[0]}")
    return labels, content[end:]


def _content(file: io.BufferedReader, path: Path, offset: int, number: int) -> bytes:
    """Return the content of a record, which its writer divided wherever it contained the magic number."""
    file.seek(offset)
    parts: list[bytes] = []
    while True:
        magic, length = struct.unpack("<II", file.read(8).ljust(8, b"\0"))
        kind, size = length >> 29, length & (2**29 - 1)
        part = file.read(size) if magic == _MAGIC else b""
        if magic != _MAGIC or len(part) < size or kind not in ((_MIDDLE, _LAST) if parts else (_WHOLE, _FIRST)):
            raise _damaged(path, number)
        parts.append(part)
        if kind in (_WHOLE, _LAST):
            return struct.pack("<I", _MAGIC).join(parts)
        file.seek(-size % 4, io.SEEK_CUR)


def _damaged(path: Path, number: int, problem: str = "is damaged or truncated") -> DataError:
    return DataError(f"{path.absolute()}: record {number} {problem}.\n  fix: restore this file of the dataset")


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of lists, bytes and bools; of functions only the one by which old protocols store bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encode
        self._refuse(f"{module}.{name}")

    @staticmethod
    def _refuse(name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the file refers to {name}, which is not executed")


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def read_pairs(path: Path) -> tuple[list[bytes], list[bool]]:
    """Read a ``.bin`` file of pairs: encoded images, and for each pair whether it is of one identity.

    The file is a pickle. Only lists, bytes and bools are created; nothing in the file is executed.

    Raises:
        DataError: if the file cannot be read, or contains something else.
    """
    with _open(path) as file:
        try:
            images, same = _PlainUnpickler(file, encoding="bytes").load()
            images, same = list(images), list(same)
            if not all(isinstance(image, bytes) for image in images) or not all(each in (0, 1) for each in same):
                raise ValueError("expected a list of encoded images and a list of bools")
            same = [bool(each) for each in same]
        except Exception as error:  # damaged pickles raise many types
            raise DataError(
                f"{path.absolute()} is not a file of pairs: {error}.\n  fix: restore this file of the dataset"
            ) from error
    if not same or len(images) != 2 * len(same):
        raise DataError(
            f"{path.absolute()}: expected two images for each of {len(same)} pairs, got {len(images)}.\n"
            "  fix: restore this file of the dataset"
        )
    return images, same
