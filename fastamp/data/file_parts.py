"""Images inside larger files: a path ``FILE#START+COUNT`` names bytes of a file.

Archives of many encoded images, e.g. RecordIO or uncompressed tar files, are read without unpacking them: a dataset
lists such paths. The file is opened for each image, so that no process shares or pickles an open file.
"""

import os
import re

from fastamp.utils.files import check_not_device

_PARTS = re.compile(r"(.+)#(\d{1,18}\+\d{1,18}(?:,\d{1,18}\+\d{1,18})*)", re.DOTALL)


def file_of(path: str | os.PathLike[str]) -> str:
    """Return the file that contains the image ``path``: the part before ``#START+COUNT``, or the path itself."""
    return _split(path)[0]


def read_bytes(path: str | os.PathLike[str]) -> bytearray:
    """Read an encoded image.

    Args:
        path: image file, or ``FILE#START+COUNT`` for ``COUNT`` bytes of a file from byte ``START``, which is counted
            from 0. Several ranges, separated by commas, are joined: ``FILE#START+COUNT,START+COUNT``.

    Raises:
        OSError: if the file cannot be read, is a device, or is shorter than the ranges.
    """
    file_name, ranges = _split(path)
    check_not_device(file_name)
    with open(file_name, "rb", buffering=0) as file:
        if ranges is None:
            return bytearray(file.read())
        _check_size(ranges, os.fstat(file.fileno()).st_size)
        content = bytearray()
        for start, count in ranges:
            file.seek(start)
            content += file.read(count)
        return content


def check_readable(path: str) -> None:
    """Check, without reading it, that an image can be read, and that it is not empty.

    Raises:
        OSError: if the file is missing, empty, not readable, or shorter than the ranges of the path.
    """
    file_name, ranges = _split(path)
    size = os.path.getsize(file_name)
    if not os.access(file_name, os.R_OK):
        raise OSError("permission denied")
    if ranges is not None:
        _check_size(ranges, size)
        size = sum(count for _, count in ranges)
    if not size:
        raise OSError("the file is empty")


def _split(path: str | os.PathLike[str]) -> tuple[str, list[tuple[int, int]] | None]:
    """Split a path into the file and the ranges (start, count); None for the whole file."""
    path = os.fspath(path)
    match = _PARTS.fullmatch(path) if "#" in path else None
    if match is None:
        return path, None
    ranges = (bounds.split("+") for bounds in match[2].split(","))
    return match[1], [(int(start), int(count)) for start, count in ranges]


def _check_size(ranges: list[tuple[int, int]], size: int) -> None:
    last = max(start + count for start, count in ranges)
    if last > size:
        raise OSError(f"bytes up to {last} of a file of {size} bytes")
