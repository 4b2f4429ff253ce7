"""Read CSV files of images: a header, and one line for each image."""

import codecs
import csv
import itertools
import logging
import operator
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.data.datasets.csv_columns import CsvColumnBuilder
from fastamp.data.datasets.identity_names import is_unknown_identity, merge_equal_names
from fastamp.data.datasets.items import RESERVED_NAMES, Column, PackedText, PathBuilder, split_path
from fastamp.utils.errors import DataError, did_you_mean
from fastamp.utils.files import check_not_device, expand

logger = logging.getLogger(__name__)

SPLITS = ("train", "query", "gallery")
# An image of the database is a training image and a gallery image.
DATABASE = "database"
SPLIT_NUMBERS = {split: number for number, split in enumerate((*SPLITS, DATABASE))}
_BOX = ("x0", "y0", "x1", "y1")
_BOX_WITH_SIZE = ("x", "y", "w", "h")
COLUMNS = ("path", "pid", "camid", "split", *_BOX)
_MAX_HEADER = 2**16
_MAX_COORDINATE = 2**31
_LINES_AT_ONCE = 4096
_SEPARATOR = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
# A comment above the header; "# path,pid" is a header.
_COMMENT = re.compile(r"#(?![# ]*[\"']?path\b)", re.IGNORECASE)
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f]")
# Values of a column split that are not used here.
_TEST_SPLITS = {"test", "testing", "val", "valid", "validation", "eval"}


@dataclass(frozen=True)
class _CategoricalText:
    """Sequence of N strings with few distinct values: string i is ``values[codes[i]]``; ``codes`` is (N,) int64."""

    values: list[str]
    codes: np.ndarray


@dataclass(frozen=True)
class CsvTable:
    """Labels and paths of the N images that a CSV file lists.

    Attributes:
        lines: (N,) int64 line numbers.
        paths: return value of ``PathBuilder.build``.
        pids: identities as written in the file.
        camids: cameras as written in the file; None if there is no column ``camid``.
        splits: (N,) int8 indices into ``SPLITS``; None if there is no column ``split``.
        boxes: (N, 4) int64 boxes; None if there are no columns ``x0`` to ``y1``.
        excluded: name -> number of images of unknown identities, which the table does not contain.
        invalid: line number -> problem of each invalid line, which the table does not contain.
        columns: further columns, by name.
    """

    lines: np.ndarray
    paths: tuple[PackedText, np.ndarray, PackedText]
    pids: _CategoricalText
    camids: _CategoricalText | None
    splits: np.ndarray | None
    boxes: np.ndarray | None
    excluded: Counter[str]
    invalid: dict[int, str]
    columns: dict[str, Column]

    @property
    def has_training_images(self) -> bool:
        """True if the column ``split`` marks images for training."""
        return self.splits is not None and bool(
            np.isin(self.splits, (SPLIT_NUMBERS["train"], SPLIT_NUMBERS[DATABASE])).any()
        )


class CsvRows:
    """Rows of a CSV file below its header, without comments: rows that begin with # and have another number of values.

    Args:
        reader: CSV reader after the header.
        width: number of columns.
        skipped: number of lines before the header.
    """

    def __init__(self, reader: Any, width: int, skipped: int) -> None:
        self._reader, self._width, self._skipped = reader, width, skipped

    @property
    def line_num(self) -> int:
        """Number of the last line of the row that was read."""
        return int(self._reader.line_num + self._skipped)

    def __iter__(self) -> Iterator[list[str]]:
        return (row for row in self._reader if len(row) == self._width or not row or not row[0].startswith("#"))


@contextmanager
def open_table(file: Path) -> Iterator[tuple[CsvRows, list[str]]]:
    """Open a CSV file and yield the rows below the header, and the lowercase column names.

    The columns are separated by commas, semicolons, tabs or vertical bars. The encoding is UTF-8 or UTF-16. Comments,
    lines that begin with #, are skipped, and so is the line sep=; of Excel, which states the separator.

    Raises:
        DataError: if the file cannot be read, or is not a CSV file.
    """
    rows = None
    try:
        check_not_device(file)
        with file.open(encoding=_encoding(file), newline="") as stream:
            delimiter = ""
            for skipped in itertools.count():
                start, header = stream.tell(), stream.readline(_MAX_HEADER + 1)
                if len(header) > _MAX_HEADER:
                    raise DataError(
                        f"{file}: the first line must be a header of at most {_MAX_HEADER} characters.\n"
                        "  fix: check that the file is a CSV file, and add a header such as path,pid,camid,split"
                    )
                stated = _SEPARATOR.fullmatch(header.strip("\r\n"))
                if stated and not skipped:
                    delimiter = stated[1]
                elif not _COMMENT.match(header):
                    break
            delimiter = delimiter or find_delimiter(header) or ","
            stream.seek(start)
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            names = [name.strip().lower() for name in next(reader, [])]
            if names:
                names[0] = names[0].lstrip("# ")
            if not any(names):
                fault = "the first line is empty" if header else "the file is empty"
                raise DataError(f"{file}: {fault}.\n  fix: use a first line such as path,pid,camid,split")
            rows = CsvRows(reader, len(names), skipped)
            yield rows, names
    except (OSError, UnicodeError, csv.Error) as error:
        line = f", line {rows.line_num}" if isinstance(error, csv.Error) and rows else ""
        raise DataError(
            f"{file}{line}: cannot read the CSV file: {error}.\n"
            "  fix: save the table as a readable CSV file in UTF-8 (in Excel: the file type CSV UTF-8)"
        ) from error


def find_delimiter(line: str) -> str | None:
    """Return the most frequent of comma, semicolon, tab and vertical bar in a line; None if it has none of them."""
    delimiter = max(",;\t|", key=line.count)
    return delimiter if delimiter in line else None


def _encoding(file: Path) -> str:
    """Return the encoding of a CSV file: UTF-16 if it begins with its mark or contains zero bytes, else UTF-8."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    return {b"\0": "utf-16-be"}.get(start[:1]) or ("utf-16-le" if start[1:2] == b"\0" else "utf-8-sig")


def read_table(file: Path, identity: Sequence[str]) -> CsvTable:
    """Read a CSV file into arrays; ``identity`` lists the columns whose values are the identity.

    Images of unknown identities are excluded, except if the column ``split`` marks only such images for training: these
    have the identity ``unknown``, for training without labels.

    Raises:
        DataError: if the file cannot be read, or the header is invalid.
    """
    with open_table(file) as (reader, names):
        identity = [name.lower() for name in identity]
        _check_header(file, names, identity)
        table = _read_lines(file, reader, names, identity)
    if table.excluded and table.splits is not None and not table.has_training_images:
        with open_table(file) as (reader, names):
            table = _read_lines(file, reader, names, identity, unlabeled=True)
        if table.has_training_images:
            logger.warning(
                "%s: all training images have unknown identities: they are one identity, for training without labels\n"
                "  fix: for training with labels, write their identities",
                file,
            )
    return table


def _read_lines(
    file: Path, reader: Any, names: list[str], identity: Sequence[str], *, unlabeled: bool = False
) -> CsvTable:
    """Read the lines below the header; see ``read_table``."""
    box = box_columns(names)
    column_of = {name: names.index(name) for name in (*COLUMNS[: -len(_BOX)], *box) if name in names}
    path_column, camid_column, split_column = column_of["path"], column_of.get("camid"), column_of.get("split")
    pid_columns = [names.index(name) for name in identity]
    required = {*identity, *column_of} - ({"pid"} - set(identity))
    used = operator.itemgetter(*map(names.index, required))  # at least path and an identity
    lines, splits, boxes, paths = array("q"), array("b"), array("q"), PathBuilder()
    pids, camids = _CategoricalTextBuilder(), _CategoricalTextBuilder()
    builders = {
        names.index(name): CsvColumnBuilder()
        for name in names
        if name and name not in (*COLUMNS, *box) and name not in RESERVED_NAMES
    }
    pending: list[list[str]] = []

    def append_pending() -> None:
        """Append the labels of the pending lines column by column, which is faster than line by line."""
        if not pending:
            return
        columns = list(zip(*pending, strict=True))
        pending.clear()
        pids.extend(["/".join(parts) for parts in zip(*(columns[column] for column in pid_columns), strict=True)])
        if camid_column is not None:
            camids.extend(columns[camid_column])
        for column, builder in builders.items():
            builder.extend(columns[column])

    folders: dict[str, str] = {}
    invalid: dict[int, str] = {}
    excluded: Counter[str] = Counter()
    for line in reader:
        text = "".join(line)
        is_clean = " " not in text and text.isprintable()  # no white space and no control characters
        values = line if is_clean else [value.strip() for value in line]
        if not any(values):
            continue
        number = reader.line_num
        try:
            if (
                len(values) != len(names)
                or "" in (cells := used(values))
                or not (is_clean or "".join(cells).isprintable())
            ):
                _check_line(names, values, required)
                values += [""] * (len(names) - len(values))
            split = 0
            if split_column is not None:
                known_split = SPLIT_NUMBERS.get(values[split_column])
                split = _parse_split(values[split_column]) if known_split is None else known_split
            if is_unknown_identity(name := values[pid_columns[0]]):
                if not unlabeled or split:
                    excluded[name] += 1
                    continue
                for column in pid_columns:
                    values[column] = "unknown"
            if box:
                boxes.extend(_parse_box(box, [values[column_of[name]] for name in box]))
        except DataError as error:
            invalid[number] = str(error)
            continue
        if split_column is not None:
            splits.append(split)
        folder, name = split_path(values[path_column])
        if name in ("", ".", "..") or (not folder and name[0] == "~"):
            paths.append(*split_path(str(file.parent / expand(values[path_column]))))
        else:
            if folder not in folders:  # expand the folder once, with a dummy file name
                folders[folder] = str(file.parent / expand(f"{folder}x"))[:-1]
            paths.append(folders[folder], name)
        lines.append(number)
        pending.append(values)
        if len(pending) == _LINES_AT_ONCE:
            append_pending()
    append_pending()
    return CsvTable(
        lines=np.array(lines, dtype=np.int64),
        paths=paths.build(),
        pids=pids.build(f"{file}", "identity"),
        camids=None if camid_column is None else camids.build(f"{file}", "camera"),
        splits=None if split_column is None else np.array(splits, dtype=np.int8),
        boxes=np.array(boxes, dtype=np.int64).reshape(-1, 4) if box else None,
        excluded=excluded,
        invalid=invalid,
        columns={names[column]: builder.build() for column, builder in builders.items()},
    )


class _CategoricalTextBuilder:
    """Append strings to build a ``_CategoricalText``."""

    def __init__(self) -> None:
        self._code_of: dict[str, int] = {}
        self._codes = array("q")

    def extend(self, texts: Sequence[str]) -> None:
        """Append strings."""
        for text in dict.fromkeys(texts):
            self._code_of.setdefault(text, len(self._code_of))
        self._codes.extend(map(self._code_of.__getitem__, texts))

    def build(self, title: str, kind: str) -> _CategoricalText:
        """Return the categorical strings; names of equal numbers become one, see ``merge_equal_names``."""
        merged = merge_equal_names(self._code_of, title, kind)
        code_of = {name: code for code, name in enumerate(dict.fromkeys(merged.values()))}
        codes = np.array([code_of[name] for name in merged.values()], dtype=np.int64)
        return _CategoricalText(list(code_of), codes[np.array(self._codes, dtype=np.int64)])


def box_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the box; () if there are none."""
    if "x0" in names:
        return _BOX
    return _BOX_WITH_SIZE if {*_BOX_WITH_SIZE} <= {*names} else ()


def _check_line(names: Sequence[str], values: Sequence[str], required: Collection[str]) -> None:
    """Raise DataError if a line has too many values, an empty value in a required column, or control characters."""
    row = {name: value for name, value in zip(names, values, strict=False) if name in required}
    empty = [name for name in names if name in required and not row.get(name)]
    if empty or len(values) > len(names):
        problem = f"no value for {', '.join(empty)}" if empty else f"expected {len(names)} values, got {len(values)}"
        raise DataError(problem)
    with_control = [name for name, value in row.items() if _CONTROL_CHARACTERS.search(value)]
    if with_control:
        raise DataError(f"control characters in {with_control[0]}: {row[with_control[0]]!r:.100}")


def _check_header(file: Path, names: Sequence[str], identity: Sequence[str]) -> None:
    """Raise DataError if a required column is missing or a column is duplicated."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    boxes = [name for name in _BOX if name in names]
    missing = [name for name in ("path", *identity, *(_BOX if boxes else ())) if name not in names]
    unknown = [name for name in names if name and name not in COLUMNS]
    optional = [name for name in COLUMNS if name not in names]
    if twice or missing:
        hints = "".join(dict.fromkeys(did_you_mean(name, unknown) for name in missing))
        fault = f"missing {', '.join(missing)}" if missing else f"duplicate {', '.join(sorted(twice))}"
        raise DataError(
            f"{file}: invalid header {_truncate(','.join(names))}: {_truncate(fault)}."
            f"{hints}\n"
            f"  fix: use a first line such as path,pid,camid,split or path,pid,{','.join(_BOX)}"
            + "; or name the columns of the identity, e.g. DATASETS.CSV.IDENTITY [name]"
            * any(name in missing for name in identity)
        )
    reserved = [name for name in unknown if name in RESERVED_NAMES]
    if reserved:
        logger.warning(
            "%s: ignoring the columns %s, whose names have another meaning\n  fix: rename them",
            file,
            _truncate(", ".join(reserved)),
        )
    if "theta" in names and box_columns(names) == _BOX_WITH_SIZE:
        raise DataError(
            f"{file}: boxes as x, y, w and h with a rotation theta are not supported.\n"
            f"  fix: write the columns {', '.join(_BOX)} around the rotated box; or rename the columns to use whole "
            "images"
        )
    unknown = [name for name in unknown if name not in box_columns(names)]
    similar = [f"{name}:{did_you_mean(name, optional)}" for name in unknown if did_you_mean(name, optional)]
    if similar:
        logger.warning(
            "%s: read as further columns, without a meaning for fastamp: %s\n  fix: rename them if this is a mistake",
            file,
            _truncate("; ".join(similar)),
        )


def _truncate(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def _parse_split(text: str) -> int:
    """Return the index in ``SPLITS`` of a value of the column ``split``."""
    number = SPLIT_NUMBERS.get(text.lower())
    if number is not None:
        return number
    hint = did_you_mean(text, (*SPLITS, DATABASE))
    if text.lower() in _TEST_SPLITS:
        hint = " Test images are query (images that are searched for) or gallery (images that are searched)."
    raise DataError(f"unknown split {text!r}; choices: {', '.join((*SPLITS, DATABASE))}.{hint}")


def _parse_box(columns: Sequence[str], values: Sequence[str]) -> tuple[int, int, int, int]:
    """Convert a box, with the corner x1, y1 or with width and height, to ``(x0, y0, x1, y1)``."""
    try:
        corners = [float(value) for value in values]
        if max(map(abs, corners)) <= 1:
            raise DataError(f"box {' '.join(values)} is normalized to 0..1; multiply it by the size of its image file")
        if columns == _BOX_WITH_SIZE:
            corners[2:] = corners[0] + corners[2], corners[1] + corners[3]
        x0, y0, x1, y1 = map(round, corners)
    except (ValueError, OverflowError) as error:
        fix = " (write a decimal point, not a comma)" if "," in "".join(values) else ""
        raise DataError(f"{' '.join(columns)} must be numbers, got {' '.join(values)}{fix}") from error
    if not (-_MAX_COORDINATE < x0 < x1 < _MAX_COORDINATE and -_MAX_COORDINATE < y0 < y1 < _MAX_COORDINATE):
        box = f"{x0} {y0} {x1} {y1}"
        if columns == _BOX_WITH_SIZE:
            box += f" (x1 = x + w, y1 = y + h, from {' '.join(values)})"
        raise DataError(f"box: expected x0 < x1 and y0 < y1, in pixels, got {box}")
    return x0, y0, x1, y1
