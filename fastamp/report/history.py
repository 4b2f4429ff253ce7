"""What a run wrote into metrics.json, as one series for each metric."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from fastamp.utils.errors import DataError


@dataclass
class History:
    """Metrics over a run.

    Attributes:
        series: metric -> its (iteration, value) pairs in the order of the iterations; what was not finite is NaN.
    """

    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def latest(self, name: str) -> float | None:
        """Return a metric's last finite value; None when there is none."""
        return next((value for _, value in reversed(self.series.get(name, [])) if math.isfinite(value)), None)

    def names(self, *, prefix: str = "", suffix: str = "") -> list[str]:
        """Return the metrics whose names begin and end like this, in the order in which they first came."""
        return [name for name in self.series if name.startswith(prefix) and name.endswith(suffix)]


def read_history(path: Path) -> History:
    """Return what is in a ``metrics.json``; a line that a kill cut short is left out.

    Raises:
        DataError: it is not there, or cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
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
