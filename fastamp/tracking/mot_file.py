"""Detections, tracks and ground truth as text files of the MOT Challenge (Leal-Taixe et al. 2015, arXiv:1504.01942).

A line is ``frame,id,left,top,width,height[,confidence,...]``; frames are numbered from 1, and boxes are in pixels.
Instead of commas, the file may have semicolons, tabs or spaces. Text after ``#`` is a comment, and the first line may
be a header.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastamp.data.boxes import are_normalized, normalized_error
from fastamp.data.datasets.csv_table import find_delimiter
from fastamp.utils.errors import DataError, system_cause
from fastamp.utils.files import check_not_device, expand, write_atomically

_COLUMNS = ("frame", "id", "left", "top", "width", "height", "confidence")
_HEADER_NAMES = {
    **dict.fromkeys(("left", "x", "x0", "x1", "xmin"), "left"),
    **dict.fromkeys(("top", "y", "y0", "y1", "ymin"), "top"),
    **dict.fromkeys(("width", "w"), "width"),
    **dict.fromkeys(("height", "h"), "height"),
    **dict.fromkeys(("id", "trackid", "objectid"), "id"),
    **dict.fromkeys(("confidence", "conf", "score"), "confidence"),
    **dict.fromkeys(("frame", "frameid", "frameno", "framenumber"), "frame"),
    **dict.fromkeys(("class", "classid", "cls", "label", "category"), "class"),
    **dict.fromkeys(("right", "x2", "xmax"), "right"),
    **dict.fromkeys(("bottom", "y2", "ymax"), "bottom"),
    **dict.fromkeys(("cx", "xc", "xcenter", "centerx"), "center x"),
    **dict.fromkeys(("cy", "yc", "ycenter", "centery"), "center y"),
}
"""Lowercase name in a header, without separators and the prefixes ``bb`` and ``bbox`` -> column."""
_LARGEST_INTEGER = 2**53


@dataclass(frozen=True)
class Boxes:
    """Boxes of a MOT file, sorted by frame.

    Attributes:
        path: file.
        lines: (N,) int64, number of the line in the file, from 1.
        frames: (N,) int64, from 1.
        ids: (N,) int64; -1 in files of detections.
        boxes: (N, 4) float64, left, top, width and height in pixels.
        confidences: (N,) float64; 1 if the file has no such column. In ground truth, 0 means: not counted.
    """

    path: Path
    lines: NDArray[np.int64]
    frames: NDArray[np.int64]
    ids: NDArray[np.int64]
    boxes: NDArray[np.float64]
    confidences: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.lines)

    def select(self, rows: NDArray[np.bool_]) -> "Boxes":
        """Return the boxes of the given rows."""
        frames, ids, confidences = self.frames[rows], self.ids[rows], self.confidences[rows]
        return Boxes(self.path, self.lines[rows], frames, ids, self.boxes[rows], confidences)


def read_boxes(path: str | os.PathLike[str]) -> Boxes:
    """Read a MOT file; empty lines, comments and a header are ignored.

    Raises:
        DataError: if the file cannot be read, contains no boxes, or has an invalid line; the message names the line.
    """
    path = expand(path)
    try:
        check_not_device(path)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {system_cause(error, 'it is not a text file')}.\n"
            "  fix: pass a text file with lines frame,id,left,top,width,height,confidence"
        ) from error
    rows: list[tuple[float, ...]] = []
    has_header = False
    for number, line in enumerate(text.splitlines(), start=1):
        fields, place = _split(line), f"{path}, line {number}"
        if not fields:
            continue
        if not rows and not has_header and not any(map(_is_number, fields)):
            _check_header(fields, place)
            has_header = True
            continue
        rows.append((number, *_parse(fields, place)))
    if not rows:
        raise DataError(f"{path} contains no boxes.\n  fix: check that the detector wrote this file")
    values = np.array(rows, dtype=np.float64)
    if are_normalized(values[:, 3:7]):
        raise normalized_error(str(path))
    values = values[np.argsort(values[:, 1], kind="stable")]
    lines, frames, ids = (values[:, column].astype(np.int64) for column in range(3))
    return Boxes(path, lines, frames, ids, values[:, 3:7], values[:, 7])


def write_boxes(path: Path, boxes: Boxes) -> None:
    """Write boxes as a MOT file of results: ``frame,id,left,top,width,height,confidence,-1,-1,-1``.

    Raises:
        WriteError: if the file cannot be written.
    """
    columns = zip(boxes.frames, boxes.ids, boxes.boxes.tolist(), boxes.confidences.tolist(), strict=True)
    lines = [
        f"{frame},{number},{','.join(f'{value:.2f}' for value in box)},{confidence:g},-1,-1,-1\n"
        for frame, number, box, confidence in columns
    ]
    write_atomically(path, lambda file: file.write("".join(lines).encode()))


def _split(line: str) -> list[str]:
    """Return the fields of a line; [] if it contains only a comment or white space."""
    line = line.partition("#")[0].strip()
    fields = [word.strip() for word in line.split(find_delimiter(line))]
    while fields and not fields[-1]:
        fields.pop()
    return fields


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_header(fields: list[str], place: str) -> None:
    """Raise DataError if a header names the columns in another order, or corners instead of sizes."""
    for column, field in zip(_COLUMNS, fields, strict=False):
        name = re.sub(r"[\W_]", "", field.lower()).removeprefix("bbox").removeprefix("bb")
        if _HEADER_NAMES.get(name, column) != column:
            raise DataError(
                f"{place}: the header has {field[:40]!r} in the place of {column}.\n"
                f"  fix: write the columns {','.join(_COLUMNS)}"
            )


def _parse(fields: list[str], place: str) -> tuple[float, ...]:
    """Parse the fields of a line to (frame, id, left, top, width, height, confidence)."""
    if len(fields) < 6:
        raise DataError(
            f"{place}: expected frame,id,left,top,width,height,confidence, got {' '.join(fields)[:80]!r}.\n"
            "  fix: write at least these six columns, separated by commas"
        )
    values = []
    for name, word in zip(_COLUMNS, fields, strict=False):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (
            name in ("frame", "id") and (value != int(value) or abs(value) > _LARGEST_INTEGER)
        ):
            kind = "an integer" if name in ("frame", "id") else "a number"
            raise DataError(f"{place}: {name} must be {kind}, got {word[:40]!r}.\n  fix: correct this line")
        values.append(value)
    if values[0] < 1:
        raise DataError(
            f"{place}: frame {values[0]:.0f}, but frames are numbered from 1.\n  fix: add 1 to all frame numbers"
        )
    if min(values[4:6]) <= 0:
        raise DataError(
            f"{place}: the box has width {values[4]:g} and height {values[5]:g}; both must be above 0.\n"
            "  fix: remove this line; columns are left,top,width,height, not left,top,right,bottom"
        )
    return (*values, 1.0) if len(values) == 6 else tuple(values)
