"""Tables for terminals with text in any script."""

import unicodedata
from collections.abc import Sequence
from typing import Any

# tabulate aligns wide characters only if wcwidth is installed, which fastamp does not require.
_MIN_PADDING = 2


def display_width(text: str) -> int:
    """Return the number of columns that a text takes on a terminal: 2 for wide characters, 0 for combining marks."""
    return sum(
        0
        if unicodedata.category(character) in ("Mn", "Me", "Cf")
        else 2
        if unicodedata.east_asian_width(character) in "WF"
        else 1
        for character in text
    )


def format_table(rows: Sequence[Sequence[Any]], headers: Sequence[str], *, floatfmt: str = "g") -> str:
    """Format a Markdown table as ``tabulate(rows, headers, tablefmt="github")`` does, but align wide characters.

    Args:
        rows: values of each row; a column of numbers is aligned to the right, all other columns to the left.
        headers: name of each column.
        floatfmt: format of floats. Default "g".
    """
    columns = []
    for header, *values in zip(headers, *rows, strict=True):
        texts = [header, *(format(value, floatfmt) if isinstance(value, float) else str(value) for value in values)]
        width = max(display_width(header) + _MIN_PADDING, *map(display_width, texts))
        padding = [" " * (width - display_width(text)) for text in texts]
        on_the_left = bool(values) and all(isinstance(value, (int, float)) for value in values)
        cells = [pad + text if on_the_left else text + pad for pad, text in zip(padding, texts, strict=True)]
        columns.append([f" {cells[0]} ", "-" * (width + 2), *(f" {cell} " for cell in cells[1:])])
    return "\n".join(f"|{'|'.join(line)}|" for line in zip(*columns, strict=True))
