"""Readers of packed face images: RecordIO files of MXNet, and the ``.bin`` files of insightface's test sets."""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.data.file_parts import read_bytes
from fastamp.utils.errors import DataError, system_cause

_MAGIC = 0xCED7230A
# A record is the magic number, a word with the kind and the length of its content, and the content, filled up to a
# multiple of 4 bytes. The content is a header, further labels, and the encoded image. All numbers are little-endian.
_PREFIX, _HEADER = 8, 24
_COUNT = 2**29 - 1  # lower bits of the word; the upper three are the kind
# A whole record, or the first, a middle or the last part of one.
_FIRST, _MIDDLE, _LAST = 1, 2, 3
_EXACT = 2**24  # a label is float32, which counts exactly up to here


def read_index(path: Path) -> dict[int, int]:
    """Read the offset of each record from an ``.idx`` file, whose lines are the number and the offset of a record.

    Raises:
        DataError: if the file is empty or cannot be read, or a line is invalid.
    """
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        index = {int(number): int(offset) for number, offset in rows}
        if not index:
            raise ValueError("it is empty")
        if min(min(index), *index.values()) < 0 or max(max(index), *index.values()) >= 2**63:
            raise ValueError("expected numbers and offsets of records, integers of 63 bits that are at least 0")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path.absolute()}: {error}.\n  fix: restore this file of the dataset") from error
    return index


def find_records(path: Path) -> tuple[np.ndarray, Iterator[str]]:
    """Find the images of a ``.rec`` file with an ``.idx`` file next to it, in the order of their numbers.

    Only the headers of the records are read. Record 0 of insightface's files has no image: its label is the number of
    the first record without an image. MXNet divides a record where it contains the magic number; the parts are joined.

    Returns:
        ``(identities, paths)``: (N,) int64, and N paths ``FILE#START+COUNT`` of the encoded images, see
        ``fastamp.data.file_parts``.

    Raises:
        DataError: if a file cannot be read, or a record is truncated, damaged, or beyond the end of the file.
    """
    with _open(path) as file:
        index = read_index(path.with_suffix(".idx"))
        numbers = np.array(sorted(index), dtype=np.int64)
        offsets = np.array([index[number] for number in numbers.tolist()], dtype=np.int64)
        size = os.fstat(file.fileno()).st_size

        def check(valid: np.ndarray, problem: Callable[[int], str] = lambda row: "is damaged or truncated") -> None:
            for row in np.flatnonzero(~valid).tolist():
                raise _damaged(path, int(numbers[row]), problem(row))

        check(offsets < size, lambda row: f"begins at byte {offsets[row]} of a file of {size} bytes")
        check((offsets % 4 == 0) & (offsets + _PREFIX + _HEADER <= size))
        words = np.memmap(file, dtype="<u4", mode="r", shape=size // 4)
        magic, kinds, counts, extra, label = np.asarray(words[offsets[:, None] // 4 + [0, 1, 1, 2, 3]]).T
        kinds, counts = kinds >> 29, (counts & _COUNT).astype(np.int64)
        starts, headers = offsets + _PREFIX, _HEADER + 4 * extra.astype(np.int64)
        check((magic == _MAGIC) & (kinds <= _FIRST) & (counts >= headers) & (starts + counts <= size))
        # With several labels, the header ends with them, and the first one counts.
        label = np.where(extra > 0, np.asarray(words[(offsets // 4 + 8).clip(max=len(words) - 1)]), label)
        labels = label.astype("<u4").view("<f4")
        check(np.isfinite(labels), lambda row: f"has the label {labels[row]}")
        extra_parts = {
            row: _further_parts(words, path, int(numbers[row]), int(starts[row] + counts[row]))
            for row in np.flatnonzero(kinds == _FIRST).tolist()
        }
    is_image = (counts > headers) | (kinds == _FIRST)
    chosen = np.ones(len(numbers), dtype=bool)
    if not is_image[0]:
        chosen = numbers < labels[0]
        chosen[0] = False
        chosen &= is_image | (numbers < _EXACT)
    check(is_image | ~chosen, lambda row: "has no image")
    if not chosen.any():
        raise DataError(f"{path.absolute()} has no images.\n  fix: restore this file of the dataset")
    rows, starts, counts = np.flatnonzero(chosen), (starts + headers)[chosen], (counts - headers)[chosen]
    ranges = zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True)
    return labels[chosen].astype(np.int64), (
        f"{path}#{','.join(f'{start}+{count}' for start, count in [(start, count), *extra_parts.get(row, ())])}"
        for row, start, count in ranges
    )


def _further_parts(words: np.ndarray, path: Path, number: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges (start, count) of a divided record after its first part, which ends at byte ``end``."""
    ranges, kind = [], _FIRST
    while kind != _LAST:
        offset = end + -end % 4
        if offset + _PREFIX > 4 * len(words):
            raise _damaged(path, number, "is damaged or truncated")
        magic, word = words[offset // 4 : offset // 4 + 2].tolist()
        kind, count = word >> 29, word & _COUNT
        end = offset + _PREFIX + count
        if magic != _MAGIC or kind not in (_MIDDLE, _LAST) or end > 4 * len(words):
            raise _damaged(path, number, "is damaged or truncated")
        # The magic number itself is only in front of the part.
        ranges += [(offset, 4), (offset + _PREFIX, count)]
    return ranges


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read the identity and the encoded image of each record; see ``find_records``."""
    for identity, image in zip(*find_records(path), strict=True):
        yield int(identity), bytes(read_bytes(image))


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {path.absolute()}: {system_cause(error)}.\n  fix: correct the path") from error


def _damaged(path: Path, number: int, problem: str) -> DataError:
    return DataError(f"{path.absolute()}: record {number} {problem}.\n  fix: restore this file of the dataset")


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of lists, bytes and bools; of functions only the one by which old protocols store bytes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError(f"the file refers to {module}.{name}, which is not executed")


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
            if not all(isinstance(image, bytes) for image in images) or not all(flag in (0, 1) for flag in same):
                raise ValueError("expected a list of encoded images and a list of bools")
            same = [bool(flag) for flag in same]
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
