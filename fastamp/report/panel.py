"""Charts as data, rendered as SVG in the report and by matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Maximum number of points per line.
_MAX_POINTS = 300
_TICKS = 5


@dataclass(frozen=True)
class Line:
    """Line in a chart.

    Attributes:
        name: label in the legend.
        x, y: (N,) float64; non-finite points are gaps.
        steps: if True, draw a step function that is constant until the next point.
        filled: if True, fill the area below the line.
        dots: if True, mark the points.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    steps: bool = False
    filled: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """Data of a chart.

    Attributes:
        title: title.
        x_label, y_label: axis labels.
        lines: at least one line.
        x_log, y_log: if True, use a logarithmic axis and omit points that are not above 0.
        x_range, y_range: range of the axis; None for the range of the data.
        note: sentence below the chart.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = field(default_factory=tuple)
    x_log: bool = False
    y_log: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    note: str = ""

    @property
    def empty(self) -> bool:
        """True if no point can be drawn."""
        return not any(self.drawable(line).any() for line in self.lines)

    def drawable(self, line: Line) -> np.ndarray:
        """Select the points of a line that can be drawn: (N,) bool."""
        fits = np.isfinite(line.x) & np.isfinite(line.y)
        if self.x_log:
            fits &= line.x > 0
        if self.y_log:
            fits &= line.y > 0
        return fits

    def bounds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Compute ``(x range, y range)`` of the axes; a range of equal values is extended."""
        points = [(line.x[fits], line.y[fits]) for line in self.lines for fits in [self.drawable(line)]]
        x, y = (np.concatenate(side) for side in zip(*points, strict=True))
        return (
            self.x_range or _non_empty_range(x.min(), x.max(), log=self.x_log, margin=0.0),
            self.y_range or _non_empty_range(y.min(), y.max(), log=self.y_log, margin=0.06),
        )


def thinned(line: Line) -> Line:
    """Reduce a line to about 300 points: keep the first, minimum, maximum and last point of each segment."""
    if len(line.x) <= _MAX_POINTS:
        return line
    kept: set[int] = set()
    for part in np.array_split(np.arange(len(line.x)), _MAX_POINTS // 4):
        finite = part[np.isfinite(line.y[part])]
        kept |= {int(part[0]), int(part[-1])}
        if len(finite):
            kept |= {int(finite[line.y[finite].argmin()]), int(finite[line.y[finite].argmax()])}
    order = np.array(sorted(kept))
    return Line(line.name, line.x[order], line.y[order], line.steps, line.filled, line.dots)


def ticks(low: float, high: float, *, log: bool = False) -> list[float]:
    """Choose about five round numbers in ``low``..``high`` as ticks.

    A logarithmic axis has ticks at powers of ten if its range contains at least two.

    Args:
        low, high: range of the axis; positive for a logarithmic axis.
        log: if True, the axis is logarithmic. Default: False.
    """
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last > first:
            step = -(-(last - first) // _TICKS)
            return [10.0**power for power in range(first, last + 1, step)]
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * (1 - 1e-9))
    begin = math.ceil(low / size - 1e-9)
    marks = [number * size for number in range(begin, math.floor(high / size + 1e-9) + 1)]
    return [mark for mark in marks if mark > 0] if log else marks


def tick_text(value: float) -> str:
    """Format a tick value as a short string."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-2:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}"


def _non_empty_range(low: float, high: float, *, log: bool, margin: float) -> tuple[float, float]:
    """Extend ``low``..``high`` by a relative margin, so that the range is not empty."""
    low, high = float(low), float(high)
    if log:
        low, high = (low / 2, high * 2) if high <= low * 1.01 else (low, high)
        factor = 10 ** (margin * math.log10(high / low)) if high / low < math.inf else 1.0
        return max(low / factor, 1e-300), min(high * factor, 1e300)
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
        half = abs(high) / 10 or 0.5
        low, high = low - half, high + half
    gap = margin * (high - low)
    return low - gap, high + gap
