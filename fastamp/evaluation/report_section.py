"""Sections that a registered evaluator adds to the report of a test set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Table(NamedTuple):
    """Table of texts.

    Attributes:
        title: title; "" for none.
        headers: titles of the columns.
        rows: cells of each row.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class CountMatrix:
    """Matrix of counts, whose cells are shown as percentages of their rows, e.g. a confusion matrix.

    Attributes:
        title: title.
        note: description of rows and columns.
        corner: title of the column of row names.
        rows: names of the rows.
        columns: names of the columns.
        counts: (R, C) int64.
    """

    title: str
    note: str
    corner: str
    rows: Sequence[str]
    columns: Sequence[str]
    counts: torch.Tensor


@dataclass(frozen=True)
class ImageExample:
    """Image of the test set with a text.

    Attributes:
        index: position in the test set.
        lines: lines of the text below the image.
        correct: True for a green frame, False (default) for a red one.
    """

    index: int
    lines: Sequence[str]
    correct: bool = False


@dataclass(frozen=True)
class ReportSection:
    """Section with tables, a matrix and images.

    Attributes:
        title: title.
        note: text below the title. Default "".
        tables: tables. Default: none.
        matrix: matrix. Default None.
        examples: images. Default: none.
        examples_title: title of the images.
    """

    title: str
    note: str = ""
    tables: Sequence[Table] = ()
    matrix: CountMatrix | None = None
    examples: Sequence[ImageExample] = ()
    examples_title: str = "Images"
