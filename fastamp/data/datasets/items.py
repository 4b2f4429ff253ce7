"""Image items, and lists of image items packed into arrays."""

import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from fastamp.data.boxes import Box
from fastamp.utils.errors import DataError

# Round-trips any string, including file names that are not UTF-8.
CODEC = ("utf-8", "surrogatepass")
_NO_BOX = np.iinfo(np.int64).min

_FIELDS = ("path", "pid", "camid", "viewid", "camera", "split", "box")
_BATCH_KEYS = ("images", "targets", "camids", "viewids", "indices", "img_paths", "augmentation")
_OUTPUTS = ("features", "cls_outputs", "pred_class_logits")
RESERVED_NAMES = frozenset((*_FIELDS, *_BATCH_KEYS, *_OUTPUTS))
"""Names that a column cannot have: fields of an image, and keys of batches and of the outputs of heads."""


class ImageItem(NamedTuple):
    """Path, identity, camera and viewpoint of an image.

    Attributes:
        path: image file.
        pid: identity. Training identities are strings that begin with the name of the dataset, e.g. "market1501_2", and
            are therefore unique across datasets. Query and gallery identities are integers.
        camid: camera.
        viewid: viewpoint. Default 0.
        box: (left, top, right, bottom) of the region of the image file to use, in pixels; right and bottom are
            exclusive. Parts outside the image are cut off. None (default) uses the whole image.
        columns: column name -> int, float, str, tuple of these, or None for a missing value, e.g. ``{"modality":
            "infrared"}``. ``fastamp.data.columns`` describes the types. Default None: no columns.
    """

    path: str
    pid: int | str
    camid: int | str
    viewid: int = 0
    box: tuple[int, int, int, int] | None = None
    columns: Mapping[str, Any] | None = None


class PackedText(Sequence[str]):
    """Strings packed into one byte array, as in detectron2's ``DatasetFromList``.

    Forked worker processes share memory with their parent until one of them writes to it. Accessing an element of a
    Python list changes the element's reference count, which is a write. Reading an array does not write.

    Args:
        data: the encoded strings, concatenated.
        starts, ends: (N,) int64 offsets of each string in ``data``.
    """

    def __init__(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self._data, self._starts, self._ends = data, starts, ends

    @classmethod
    def pack(cls, texts: Iterable[str]) -> "PackedText":
        """Build a ``PackedText`` from strings."""
        builder = TextBuilder()
        for text in texts:
            builder.append(text)
        return builder.build()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> str:
        return self._data[self._starts[index] : self._ends[index]].tobytes().decode(*CODEC)

    def tolist(self) -> list[str]:
        """Return all strings as a list."""
        spans = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        data = self._data.tobytes()
        if data.isascii():  # offsets of bytes are those of characters: decode once
            text = data.decode("ascii")
            return [text[start:end] for start, end in spans]
        return [data[start:end].decode(*CODEC) for start, end in spans]

    def encoded(self, rows: np.ndarray) -> Iterator[bytes]:
        """Yield the strings in the given rows as bytes, in the encoding of ``encode``."""
        data = self._data.data
        spans = zip(self._starts[rows].tolist(), self._ends[rows].tolist(), strict=True)
        return (data[start:end].tobytes() for start, end in spans)

    def take(self, rows: np.ndarray | slice) -> "PackedText":
        """Return a ``PackedText`` with the given rows, without copying the strings."""
        return PackedText(self._data, self._starts[rows], self._ends[rows])

    @staticmethod
    def concat(parts: Sequence["PackedText"]) -> "PackedText":
        """Concatenate ``parts``. If all parts share one byte array, the array is not copied."""
        if all(part._data is parts[0]._data for part in parts):
            shifts, data = [0] * len(parts), parts[0]._data
        else:
            shifts = np.cumsum([0, *(len(part._data) for part in parts)]).tolist()
            data = np.concatenate([part._data for part in parts])
        starts = [part._starts + shift for part, shift in zip(parts, shifts, strict=False)]
        ends = [part._ends + shift for part, shift in zip(parts, shifts, strict=False)]
        return PackedText(data, np.concatenate(starts), np.concatenate(ends))


class TextBuilder:
    """Append strings one by one to build a ``PackedText``."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q")

    def append(self, text: str) -> None:
        """Append a string."""
        self._data += encode(text)
        self._ends.append(len(self._data))

    def build(self) -> PackedText:
        """Return the packed strings."""
        ends = np.array(self._ends, dtype=np.int64)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), ends))[:-1]
        return PackedText(np.frombuffer(self._data, dtype=np.uint8), starts, ends)


class Column:
    """N values, one per image, stored as numbers or as indices into a table of distinct values.

    Args:
        codes: (N,) int64 or float64 values, or int64 indices into ``table``.
        table: distinct values. None (default) means that ``codes`` are the values.
    """

    def __init__(self, codes: np.ndarray, table: Sequence[Any] | None = None) -> None:
        self.codes, self.table = codes, table

    @classmethod
    def pack(cls, values: Iterable[Any]) -> "Column":
        """Build a column from values: integers, floats, strings or other hashable values."""
        values = list(values)
        dtype = _number_dtype(values)
        if dtype is not None:
            return cls(np.array(values, dtype=dtype))
        numbers: dict[Any, int] = {}
        codes = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
        return cls.of(codes, list(numbers))

    @classmethod
    def of(cls, codes: np.ndarray, values: Sequence[Any]) -> "Column":
        """Build a column whose row i contains ``values[codes[i]]``; ``values`` may contain duplicates."""
        dtype = _number_dtype(values)
        if dtype is not None:
            return cls(np.array(values, dtype=dtype)[codes])
        numbers: dict[Any, int] = {}
        rows = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
        table = list(numbers)
        return cls(rows[codes], PackedText.pack(table) if all(type(value) is str for value in table) else table)

    @property
    def is_integer(self) -> bool:
        """True if all values are integers that fit into an int64."""
        return self.table is None and self.codes.dtype.kind == "i"

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> Any:
        code = self.codes[index].item()
        return code if self.table is None else self.table[code]

    def take(self, rows: np.ndarray | slice) -> "Column":
        """Return the given rows as a new column."""
        return Column(self.codes[rows], self.table)

    def unique(self) -> tuple[list[Any], np.ndarray]:
        """Return the list of distinct values and, for each row, the index of its value in this list: (N,) int64."""
        codes, inverse = np.unique(self.codes, return_inverse=True)
        return [code if self.table is None else self.table[code] for code in codes.tolist()], inverse.reshape(-1)

    def map(self, function: Callable[[Any], Any]) -> "Column":
        """Return a column of ``function(value)`` for all values; ``function`` is called once per distinct value."""
        values, inverse = self.unique()
        return Column.of(inverse, [function(value) for value in values])

    @staticmethod
    def concat(parts: Sequence["Column"]) -> "Column":
        """Concatenate columns."""
        if all(part.table is parts[0].table and part.codes.dtype == parts[0].codes.dtype for part in parts):
            return Column(np.concatenate([part.codes for part in parts]), parts[0].table)
        distinct = [part.unique() for part in parts]
        starts = np.cumsum([0, *(len(values) for values, _ in distinct)])
        codes = [inverse + start for (_, inverse), start in zip(distinct, starts, strict=False)]
        return Column.of(np.concatenate(codes), [value for values, _ in distinct for value in values])


def _number_dtype(values: Sequence[Any]) -> type | None:
    """Return the dtype of values that are all integers, or integers and floats; None for any other values."""
    types = set(map(type, values))
    if all(issubclass(kind, Integral) for kind in types):
        return np.int64 if not types or (min(values) >= -(2**63) and max(values) < 2**63) else None
    return np.float64 if all(issubclass(kind, Real) for kind in types) else None


class PackedItems(Sequence[ImageItem]):
    """List of ``ImageItem``, stored in arrays that worker processes read without copying memory; see ``PackedText``.

    The folder and the file name of a path are stored separately, because many images are in the same folder.

    Args:
        folders: distinct folders, each up to and including the last slash.
        folder_of: (N,) int64 index of each image's folder.
        names: N file names.
        pids, camids: N identities and cameras.
        viewids: (N,) int64 views. Default: zeros.
        boxes: (N, 4) int64 boxes, see ``ImageItem``. None (default) uses whole images.
        columns: further columns by name. Default: none.

    Raises:
        DataError: if the name of a column is reserved, see ``RESERVED_NAMES``.
    """

    def __init__(
        self,
        folders: PackedText,
        folder_of: np.ndarray,
        names: PackedText,
        *,
        pids: Column,
        camids: Column,
        viewids: np.ndarray | None = None,
        boxes: np.ndarray | None = None,
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        self.folders, self.folder_of, self.names = folders, folder_of, names
        self.pids, self.camids, self.boxes = pids, camids, boxes
        self.viewids = np.zeros(len(names), dtype=np.int64) if viewids is None else viewids
        self.columns = dict(columns or {})
        reserved = sorted(RESERVED_NAMES & self.columns.keys())
        if reserved:
            raise DataError(f"a column cannot be named {reserved[0]}, which has another meaning.\n  fix: rename it")

    @classmethod
    def of(cls, items: Iterable[tuple]) -> "PackedItems":
        """Pack tuples (path, pid, camid[, viewid[, box[, columns]]]); return ``items`` itself if already packed."""
        if isinstance(items, PackedItems):
            return items
        unpacked = [ImageItem(*item) for item in items]
        paths = PathBuilder()
        for item in unpacked:
            paths.append(*split_path(os.fsdecode(item.path)))
        boxes = None
        if any(item.box is not None for item in unpacked):
            given = [(_NO_BOX,) * 4 if item.box is None else [round(edge) for edge in item.box] for item in unpacked]
            boxes = np.array(given, dtype=np.int64)
        names = dict.fromkeys(name for item in unpacked for name in item.columns or ())
        columns = {name: Column.pack((item.columns or {}).get(name) for item in unpacked) for name in names}
        return cls(
            *paths.build(),
            pids=Column.pack(item.pid for item in unpacked),
            camids=Column.pack(item.camid for item in unpacked),
            viewids=np.array([item.viewid for item in unpacked], dtype=np.int64),
            boxes=boxes,
            columns=columns,
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(index)
        pid, camid, viewid = self.pids[index], self.camids[index], int(self.viewids[index])
        columns = {name: column[index] for name, column in self.columns.items()} or None
        return ImageItem(self.path(index), pid, camid, viewid, self.box(index), columns)

    def __iter__(self) -> Iterator[ImageItem]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(one == another for one, another in zip(self, other, strict=True))

    def __add__(self, other: Iterable[tuple]) -> "PackedItems":
        return PackedItems.concat([self, PackedItems.of(other)])

    def __radd__(self, other: Iterable[tuple]) -> "PackedItems":
        return PackedItems.concat([PackedItems.of(other), self])

    def path(self, index: int) -> str:
        """Return the path of image ``index`` without building its ``ImageItem``."""
        return self.folders[self.folder_of[index]] + self.names[index]

    def paths(self, rows: np.ndarray) -> list[str]:
        """Return the paths of the images in the given rows; faster than ``path`` for each of them."""
        codes = self.folder_of[rows].tolist()
        folders = {code: self.folders[code] for code in set(codes)}
        names = self.names.encoded(rows)
        return [folders[code] + name.decode(*CODEC) for code, name in zip(codes, names, strict=True)]

    def box(self, index: int) -> tuple[int, int, int, int] | None:
        """Return the box of image ``index``; None for a whole image."""
        if self.boxes is None or self.boxes[index, 0] == _NO_BOX:
            return None
        return tuple(self.boxes[index].tolist())

    def rows_by_file(self) -> np.ndarray:
        """Return all rows (N,) int64, those of boxes of the same file together, files in the order of the list."""
        if self.boxes is None:
            return np.arange(len(self))
        numbers: dict[str, int] = {}
        files = [numbers.setdefault(path, len(numbers)) for path in self.paths(np.arange(len(self)))]
        return np.argsort(files, kind="stable")

    def take(self, rows: np.ndarray | slice) -> "PackedItems":
        """Return the images in the given rows."""
        return PackedItems(
            self.folders,
            self.folder_of[rows],
            self.names.take(rows),
            pids=self.pids.take(rows),
            camids=self.camids.take(rows),
            viewids=self.viewids[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
            columns={name: column.take(rows) for name, column in self.columns.items()},
        )

    def replace(self, *, pids: Column | None = None, camids: Column | None = None) -> "PackedItems":
        """Return a copy with new identities or cameras; None keeps the existing values."""
        return PackedItems(
            self.folders,
            self.folder_of,
            self.names,
            pids=self.pids if pids is None else pids,
            camids=self.camids if camids is None else camids,
            viewids=self.viewids,
            boxes=self.boxes,
            columns=self.columns,
        )

    def rows_in(self, folders: Collection[str]) -> np.ndarray:
        """Return the ascending row numbers of the images in ``folders``, which end with a slash or are empty."""
        chosen = [number for number, folder in enumerate(self.folders) if folder in folders]
        return np.flatnonzero(np.isin(self.folder_of, chosen))

    def find(self, path: str, box: Box | None = None) -> int | None:
        """Return the number of the first row that contains ``path`` and, if given, ``box``, or None if no row does."""
        folder, name = split_path(path)
        rows = (row for row in self.rows_in({folder}).tolist() if self.names[row] == name)
        return next((row for row in rows if box is None or self.box(row) == box), None)

    @staticmethod
    def concat(parts: Sequence["PackedItems"]) -> "PackedItems":
        """Concatenate ``parts``, at least one."""
        parts = [part for part in parts if len(part)] or [parts[0]]
        if len(parts) == 1:
            return parts[0]
        folders, folder_of = parts[0].folders, [part.folder_of for part in parts]
        if any(part.folders is not folders for part in parts):
            starts = np.cumsum([0, *(len(part.folders) for part in parts)])
            folder_of = [rows + start for rows, start in zip(folder_of, starts, strict=False)]
            folders = PackedText.concat([part.folders for part in parts])
        boxes = None
        if any(part.boxes is not None for part in parts):
            none = [np.full((len(part), 4), _NO_BOX) if part.boxes is None else part.boxes for part in parts]
            boxes = np.concatenate(none)
        names = dict.fromkeys(name for part in parts for name in part.columns)
        missing = [Column(np.zeros(len(part), dtype=np.int64), (None,)) for part in parts] if names else []
        columns = {
            name: Column.concat([part.columns.get(name, none) for part, none in zip(parts, missing, strict=True)])
            for name in names
        }
        return PackedItems(
            folders,
            np.concatenate(folder_of),
            PackedText.concat([part.names for part in parts]),
            pids=Column.concat([part.pids for part in parts]),
            camids=Column.concat([part.camids for part in parts]),
            viewids=np.concatenate([part.viewids for part in parts]),
            boxes=boxes,
            columns=columns,
        )


class PathBuilder:
    """Append paths one by one to build the arrays of ``PackedItems``."""

    def __init__(self) -> None:
        self._folders: dict[str, int] = {}
        self._folder_of, self._names = array("q"), TextBuilder()

    def append(self, folder: str, name: str) -> None:
        """Append the path ``folder + name``; the folder ends with a slash or is empty."""
        self._folder_of.append(self._folders.setdefault(folder, len(self._folders)))
        self._names.append(name)

    def build(self) -> tuple[PackedText, np.ndarray, PackedText]:
        """Return ``(folders, folder_of, names)``; see ``PackedItems``."""
        return PackedText.pack(self._folders), np.array(self._folder_of, dtype=np.int64), self._names.build()


def encode(text: str) -> bytes:
    """Encode a string to the bytes that ``PackedText`` stores."""
    return text.encode(*CODEC)


def split_path(path: str) -> tuple[str, str]:
    """Return ``(folder, name)``; the folder ends with the last slash in the path, or is empty if there is none."""
    folder, slash, name = path.rpartition("/")
    return folder + slash, name
