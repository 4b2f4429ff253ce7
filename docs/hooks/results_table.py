"""Table of the results in ``docs/results``."""

from pathlib import Path

from markdown_text import escape, table

from fastamp.engine.reproduction import read_rows, row_table

RESULTS_MARKER = "<!-- table of results -->"
FOLDER = Path(__file__).parents[1] / "results"


def results_table(folder: Path = FOLDER) -> str:
    """Return one line per file of ``folder``, as Markdown; a sentence if there are none."""
    cells, headers = row_table(read_rows(folder))
    rows = [[escape(cell) for cell in line] for line in cells]
    return table(headers, rows) if rows else "There are no results yet: no file has been measured on real images."
