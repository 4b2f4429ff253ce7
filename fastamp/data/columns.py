"""Named columns: further labels of the images of a dataset, such as modality, clothes or species.

A column has one type, which its values determine:

======== ================================= =================================== =====================================
type     values                            in a batch                          missing
======== ================================= =================================== =====================================
integer  all are integers                  (B,) int64                          -1; negative values are then an error
float    all are numbers                   (B,) float32                        NaN
list     all are tuples                    (B, L) float32 or int64 if they     list of tuples; a missing one is empty
                                           are L numbers each
text     anything else                     (B,) int64, number of the text      -1
======== ================================= =================================== =====================================

Texts are numbered in sorted order: integers in ascending order (007 before 07 and 7), then other texts. The training
set numbers its own texts. The numbers of training and test images agree only for columns in ``DATASETS.CATEGORIES``.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from fastamp.config import Key
from fastamp.data.datasets.items import Column, PackedItems
from fastamp.utils.errors import ConfigError, DataError, did_you_mean
from fastamp.utils.missing import MISSING, is_missing

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "DATASETS.CATEGORIES",
        {},
        "Column name -> its values in the order of their numbers, from 0, e.g. {modality: [visible, infrared]}. "
        "Training and test images then have the same numbers, which a model that uses the column requires. An empty "
        "list numbers the values of the training set in sorted order, also if they are integers.",
    ),
    Key(
        "DATASETS.CAMERAS",
        (),
        "Names of the cameras of a CSV file in the order of their numbers, from 0; other cameras of a file have higher "
        "numbers. Set by the training if the model has embeddings of cameras (MODEL.BACKBONE.SIE_CAMERAS).",
        of=str,
    ),
    Key(
        "DATASETS.NUM_CATEGORIES",
        {},
        "Column name -> number of its categories in the training set. Set by the training, as MODEL.HEADS.NUM_CLASSES.",
    ),
)

CAMERA = "camera"
"""Name of the cameras where a config key expects a column."""

# Values of a column that a summary shows.
_NUM_EXAMPLES = 3
_NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True)
class EncodedColumn:
    """Values of a column for N images, as in batches.

    Attributes:
        values: (N,) int64 or float32, (N, L) int64 or float32, or N tuples.
        names: text of each number; () for integers in which -1 is a missing value. None (default) for other numbers and
            lists.
    """

    values: np.ndarray | list[tuple]
    names: tuple[str, ...] | None = None

    def take(self, rows: np.ndarray) -> torch.Tensor | list[tuple]:
        """Return the values of the given rows: a tensor, or a list of tuples."""
        if isinstance(self.values, list):
            return [self.values[row] for row in rows.tolist()]
        return torch.from_numpy(self.values[rows])


def encode_columns(
    columns: Mapping[str, Column], categories: Mapping[str, Sequence[Any]] | None = None, *, title: str, training: bool
) -> dict[str, EncodedColumn]:
    """Encode the columns of a dataset.

    Args:
        columns: column name -> N values.
        categories: ``DATASETS.CATEGORIES``. Default: none.
        title: names of the datasets, for messages.
        training: if True, a value that is not in a list of ``categories`` is an error. If False, such values are
            numbered after the list, in sorted order.

    Raises:
        ConfigError: if ``categories`` names a column that does not exist.
        DataError: if a training value is not in ``categories``, or integers with missing values are negative.
    """
    categories = categories or {}
    if training:
        for name in categories:
            check_column(name, columns, "DATASETS.CATEGORIES", title)
    return {
        name: _encode(name, column, categories.get(name), title=title, training=training)
        for name, column in columns.items()
    }


def check_column(name: str, columns: Mapping[str, Any], key: str, title: str) -> None:
    """Check that a column which a config key names exists.

    Raises:
        ConfigError: if it does not exist; the message lists the available columns.
    """
    if name in columns:
        return
    available = ", ".join(columns) or "none"
    raise ConfigError(
        f"{key}: {title} has no column {name!r}; available columns: {available}.{did_you_mean(name, columns)}\n"
        f"  fix: add the column to the dataset, or change {key.partition('=')[0]}"
    )


def integers_of(name: str, columns: Mapping[str, Any], key: str, title: str) -> np.ndarray:
    """Return the values of a column that a config key names, (N,) int64.

    Args:
        name: name of the column.
        columns: column name -> N encoded values, see ``EncodedColumn.values``.
        key: config key that names the column.
        title: description of the dataset for messages, e.g. "the training set (Demo)".

    Raises:
        ConfigError: if the column does not exist, has no values, or is neither integer nor text.
    """
    check_column(name, columns, key, title)
    values = columns[name]
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind != "i":
        raise ConfigError(f"{key}: the column {name!r} of {title} must be integer or text.\n  fix: choose another one")
    if len(values) and is_missing(values).all():
        raise ConfigError(f"{key}: the column {name!r} of {title} has no values.\n  fix: choose another one")
    return values


def number_names(names: Sequence[str] | set[str], *, start: int) -> dict[str, int]:
    """Number the names from ``start``: integers in ascending order (007 before 07 and 7), then text."""
    order = sorted(names, key=lambda name: (0, int(name), name) if _NUMBER.fullmatch(name) else (1, 0, name))
    return {name: number for number, name in enumerate(order, start=start)}


def to_array(column: Column) -> np.ndarray:
    """Convert a column to an array for files: int64, float64, text, or (N, L) numbers.

    Missing values are -1 in integers, NaN in floats and "" in texts. Lists of other values, or of different lengths,
    become texts in JSON.
    """
    values, inverse = column.unique()
    present = [value for value in values if not _is_missing(value)]
    kind = _type_of(present)
    if kind == "integer":
        return np.array([MISSING if _is_missing(value) else value for value in values], dtype=np.int64)[inverse]
    if kind == "float":
        return np.array([np.nan if _is_missing(value) else value for value in values], dtype=np.float64)[inverse]
    if kind == "list":
        encoded = _encode_lists(values, np.arange(len(values))).values
        if isinstance(encoded, np.ndarray):
            return encoded[inverse]
        values = [json.dumps(value) if value else None for value in encoded]
    return np.array(["" if _is_missing(value) else str(value) for value in values], dtype=str)[inverse]


def describe_type(column: Column) -> str:
    """Return the type of a column for a report: ``integer``, ``float``, ``list`` or ``text``."""
    return _type_of([value for value in column.unique()[0] if not _is_missing(value)])


def count_missing(column: Column) -> int:
    """Return the number of missing values."""
    values, inverse = column.unique()
    return int(np.array([_is_missing(value) for value in values])[inverse].sum()) if len(column) else 0


def summarize_columns(items: PackedItems) -> list[tuple[str, str, int, int, str]]:
    """Return ``(name, type, number of distinct values, number of missing values, examples)`` of each column."""
    rows = []
    for name, column in items.columns.items():
        values = [value for value in column.unique()[0] if not _is_missing(value)]
        shown = values[:_NUM_EXAMPLES] if describe_type(column) != "text" else sorted(map(str, values))[:_NUM_EXAMPLES]
        examples = ", ".join(cell_text(value) for value in shown) + ", ..." * (len(values) > _NUM_EXAMPLES)
        rows.append((name, describe_type(column), len(values), count_missing(column), examples))
    return rows


def cell_text(value: Any) -> str:
    """Return a value as the text of a CSV cell: "" for a missing value, JSON for a list."""
    if _is_missing(value):
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, tuple) else str(value)


def _is_missing(value: Any) -> bool:
    return value is None or value != value  # NaN


def _type_of(present: Sequence[Any]) -> str:
    """Return the type of a column with these distinct values, none of them missing."""
    if present and all(isinstance(value, Integral) for value in present):
        return "integer"
    if present and all(isinstance(value, Real) for value in present):
        return "float"
    return "list" if present and all(isinstance(value, tuple) for value in present) else "text"


def rankable_columns(columns: Mapping[str, EncodedColumn]) -> dict[str, np.ndarray]:
    """Return the values of the columns with one number for each image: name -> (N,)."""
    arrays = ((name, column.values) for name, column in columns.items() if isinstance(column.values, np.ndarray))
    return {name: values for name, values in arrays if values.ndim == 1}


def _encode(name: str, column: Column, listed: Sequence[Any] | None, *, title: str, training: bool) -> EncodedColumn:
    if listed is None and column.is_integer:  # without missing values
        return EncodedColumn(column.codes)
    values, inverse = column.unique()
    present = [value for value in values if not _is_missing(value)]
    kind = _type_of(present)
    if listed is not None and kind in ("integer", "text"):
        return _encode_text(name, values, inverse, [str(value) for value in listed], title, training)
    if kind == "integer":
        if len(present) < len(values) and min(present) < 0:
            raise DataError(
                f"{title}: the column {name!r} has missing values, which are encoded as -1, and negative values "
                f"such as {min(present)}.\n  fix: fill in the missing values, or use text"
            )
        numbers = np.array([MISSING if _is_missing(value) else value for value in values], np.int64)
        return EncodedColumn(numbers[inverse], () if len(present) < len(values) else None)
    if kind == "float":
        return _encode_floats(name, values, inverse, title)
    if kind == "list":
        return _encode_lists(values, inverse)
    return _encode_text(name, values, inverse, [], title, training)


def _encode_text(
    name: str, values: Sequence[Any], inverse: np.ndarray, listed: list[str], title: str, training: bool
) -> EncodedColumn:
    texts = {str(value) for value in values if not _is_missing(value)}
    unlisted = number_names(texts - set(listed), start=len(listed))
    if listed and unlisted and training:
        raise DataError(
            f"DATASETS.CATEGORIES.{name}: the training set ({title}) has values that are not listed: "
            f"{', '.join(list(unlisted)[:5])}; listed: {', '.join(listed)}.\n"
            "  fix: add these values, or set an empty list to number the values of the training set"
        )
    numbers = {text: number for number, text in enumerate(listed)} | unlisted
    codes = np.array([MISSING if _is_missing(value) else numbers[str(value)] for value in values], dtype=np.int64)
    return EncodedColumn(codes[inverse], tuple(numbers))


def _encode_floats(name: str, values: Sequence[Any], inverse: np.ndarray, title: str) -> EncodedColumn:
    exact = np.array([np.nan if _is_missing(value) else value for value in values], dtype=np.float64)
    rounded = exact.astype(np.float32)
    if len(np.unique(rounded)) < len(np.unique(exact)):
        logger.warning(
            "%s: some values of the column %r differ by less than the precision of float32 and become equal in "
            "batches\n  fix: store large numbers such as times as integers, or subtract a constant",
            title,
            name,
        )
    return EncodedColumn(rounded[inverse])


def _encode_lists(values: Sequence[Any], inverse: np.ndarray) -> EncodedColumn:
    lists = [() if _is_missing(value) else value for value in values]
    elements = [element for part in lists for element in part]
    if len({len(part) for part in lists}) == 1 and elements and all(isinstance(element, Real) for element in elements):
        dtype = np.int64 if all(isinstance(element, Integral) for element in elements) else np.float32
        return EncodedColumn(np.array(lists, dtype=dtype)[inverse])
    return EncodedColumn([lists[row] for row in inverse.tolist()])
