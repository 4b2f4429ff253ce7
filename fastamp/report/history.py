"""Training metrics read from metrics.json, as one series per metric."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from fastamp.utils.errors import DataError, system_cause


@dataclass
class History:
    """Metrics of a run over its iterations.

    Attributes:
        series: metric -> (iteration, value) pairs by increasing iteration; non-finite values are NaN.
    """

    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def latest(self, name: str) -> float | None:
        """Return the last finite value of a metric; None if there is no finite value."""
        return next((value for _, value in reversed(self.series.get(name, [])) if math.isfinite(value)), None)

    def names(self, *, prefix: str = "", suffix: str = "") -> list[str]:
        """List the metrics whose names have this prefix and suffix, in the order of their first appearance."""
        return [name for name in self.series if name.startswith(prefix) and name.endswith(suffix)]


def read_history(path: Path) -> History:
    """Read ``metrics.json``; incomplete lines, left by a killed run, are skipped.

    Raises:
        DataError: if the file is missing or cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(
            f"cannot read the training metrics {path}: {system_cause(error)}.\n"
            "  fix: choose the folder of a run that has trained, which contains metrics.json"
        ) from error
    rows = sorted((row for row in map(_row, lines) if row is not None), key=lambda row: row["iteration"])
    history = History()
    for row in rows:
        for name, value in row.items():
            number = math.nan if value is None else value
            if name != "iteration" and isinstance(number, int | float) and not isinstance(number, bool):
                history.series.setdefault(name, []).append((row["iteration"], float(number)))
    return history


def _row(line: str) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("iteration")) is int else None
