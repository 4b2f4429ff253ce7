"""Types of the further columns of a CSV file.

The values of a column determine its type; empty cells are missing values and have no influence:

- integer: all values are integers of at most 18 digits without leading zeros, such as 7 or -3. Identities such as 007
  are therefore text.
- float: all values are decimal numbers, such as 0.5 or 1e-3; no nan and no inf.
- list: all values are JSON lists of numbers or texts, such as [1, 0, 1] or ["a", "b"].
- text: any other values, and a column without values.
"""

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastamp.data.datasets.items import Column, TextBuilder

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[+-]?((0|[1-9][0-9]{0,17})(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Number of distinct values up to which they are counted while reading; more of them, such as times, are only stored.
_MAX_CATEGORIES = 2**16


class CsvColumnBuilder:
    """Append the cells of a column to build a ``Column``."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self._codes = array("q")
        self._texts: TextBuilder | None = None

    def extend(self, cells: Sequence[str]) -> None:
        """Append cells; "" for a missing value."""
        if self._texts is not None:
            for cell in cells:
                self._texts.append(cell)
            return
        for cell in dict.fromkeys(cells):
            self._number_of.setdefault(cell, len(self._number_of))
        self._codes.extend(map(self._number_of.__getitem__, cells))
        if len(self._number_of) > _MAX_CATEGORIES:
            distinct, self._texts = list(self._number_of), TextBuilder()
            for code in self._codes:
                self._texts.append(distinct[code])

    def build(self) -> Column:
        """Return the column, whose missing values are None, or NaN in a column of floats."""
        if self._texts is None:
            return Column.of(np.array(self._codes, dtype=np.int64), parse_values(list(self._number_of)))
        return Column.pack(parse_values(self._texts.build().tolist()))


def parse_values(cells: Sequence[str]) -> list[Any]:
    """Convert the cells of a column to its type; an empty cell to None, or to NaN in a column of floats."""
    filled = [cell for cell in cells if cell]
    if not filled:
        return [None] * len(cells)
    if all(map(_INTEGER.fullmatch, filled)):
        return [int(cell) if cell else None for cell in cells]
    if all(map(_FLOAT.fullmatch, filled)):
        return [float(cell) if cell else np.nan for cell in cells]
    if all(cell[0] == "[" and cell[-1] == "]" for cell in filled):
        lists = [_parse_list(cell) if cell else None for cell in cells]
        if not any(cell and value is None for cell, value in zip(cells, lists, strict=True)):
            return lists
    return [cell or None for cell in cells]


def _parse_list(cell: str) -> tuple | None:
    """Parse a JSON list of numbers or texts; None if it is not one."""
    try:
        values = json.loads(cell)
    except (ValueError, RecursionError):
        return None
    return tuple(values) if all(type(value) in (int, float, str) for value in values) else None
