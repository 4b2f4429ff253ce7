"""Readers of packed face images: RecordIO files of MXNet, and the ``.bin`` files of insightface's test sets."""

import io
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fastamp.utils.errors import DataError

_MAGIC = 0xCED7230A
_HEADER = struct.Struct("<IfQQ")


def read_index(path: Path) -> dict[int, int]:
    """Read the offset of each record from an ``.idx`` file, whose lines are the number and the offset of a record.

    Raises:
        DataError: if the file cannot be read, or a line is invalid.
    """
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {int(number): int(offset) for number, offset in rows}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path.absolute()}: {error}.\n  fix: restore this file of the dataset") from error


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read the identity and the encoded image of each record of a ``.rec`` file with an ``.idx`` file next to it.

    Record 0 of insightface's files has no image: its label is the number of the first record without an image.

    Raises:
        DataError: if a file cannot be read, or a record is truncated or damaged.
    """
    index = read_index(path.with_suffix(".idx"))
    with _open(path) as file:
        labels, image = _record(file, path, index, min(index, default=0))
        numbers = sorted(index)
        if not image and len(labels):
            numbers = [number for number in numbers[1:] if number < int(labels[0])]
        for number in numbers:
            labels, image = _record(file, path, index, number)
            yield int(labels[0]), image


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"cannot read {path.absolute()}: {error.strerror or error}.\n  fix: correct the path"
        ) from error


def _record(file: io.BufferedReader, path: Path, index: dict[int, int], number: int) -> tuple[np.ndarray, bytes]:
    """Return the labels, (L,) float32, and the image of a record."""
    file.seek(index.get(number, 0))
    magic, length = struct.unpack("<II", file.read(8).ljust(8, b"\0"))
    # The upper three bits are 0 for a record that is not split.
    content = file.read(length) if magic == _MAGIC and length < 2**29 else b""
    if magic != _MAGIC or len(content) < max(length, _HEADER.size):
        raise DataError(
            f"{path.absolute()}: record {number} is damaged or truncated.\n  fix: restore this file of the dataset"
        )
    count, label, *_ = _HEADER.unpack_from(content)
    if not count:
        return np.array([label], dtype=np.float32), content[_HEADER.size :]
    end = _HEADER.size + 4 * count
    return np.frombuffer(content[_HEADER.size : end], dtype="<f4"), content[end:]


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
            images, same = [bytes(image) for image in images], [bool(each) for each in same]
        except Exception as error:  # damaged pickles raise many types
            raise DataError(
                f"{path.absolute()} is not a file of pairs: {error}.\n  fix: restore this file of the dataset"
            ) from error
    if len(images) != 2 * len(same):
        raise DataError(
            f"{path.absolute()}: expected two images for each of {len(same)} pairs, got {len(images)}.\n"
            "  fix: restore this file of the dataset"
        )
    return images, same
