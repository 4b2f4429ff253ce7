"""Tables: equality with tabulate for ASCII text, and alignment of wide characters."""

import pytest
from tabulate import tabulate

from fastamp.utils.table import display_width, format_table


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 0.5, "a", -1.25], [12, 100.25, "a long word", 3.0]],
        [[1, 0.5, "", -1.25]],
        [],
    ],
)
def test_ascii_tables_equal_those_of_tabulate(rows):
    headers = ["rank", "score", "path", "x"]
    assert format_table(rows, headers, floatfmt=".4f") == tabulate(rows, headers, tablefmt="github", floatfmt=".4f")


@pytest.mark.parametrize(
    "name, width", [("abc", 3), ("李雷", 4), ("ﾊﾝｶｸ", 4), ("cafe\u0301", 4), ("محمد", 4), ("全角A", 5)]
)
def test_columns_are_aligned_by_the_width_on_a_terminal(name, width):
    assert display_width(name) == width
    lines = format_table([[name, 1], ["a long name", 2]], ["name", "count"]).splitlines()
    assert {display_width(line) for line in lines} == {len(lines[0])}
    assert len({display_width(line[: line.rindex("|", 0, -1)]) for line in lines}) == 1
