"""One chart as data, which a web page draws as SVG and matplotlib as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Points of a line that are drawn.
_MAX_POINTS = 300


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for the legend.
        x, y: (N,) float64; a point that is not finite is a gap.
        steps: each value holds until the next point.
        filled: the area below is tinted.
        dots: points are marked: there are few.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    steps: bool = False
    filled: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
        title: above it.
        x_label, y_label: of the axes.
        lines: at least one.
        x_log, y_log: whether an axis is logarithmic; what is not above 0 is left out there.
        x_range, y_range: None is that of the data.
        note: a sentence below it.
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
        """Whether there is no point to draw."""
        return not any(self.drawable(line).any() for line in self.lines)

    def drawable(self, line: Line) -> np.ndarray:
        """Return (N,) bool: which points of a line have a place."""
        fits = np.isfinite(line.x) & np.isfinite(line.y)
        if self.x_log:
            fits &= line.x > 0
        if self.y_log:
            fits &= line.y > 0
        return fits

    def bounds(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the ranges of x and y, which have a width."""
        points = [(line.x[fits], line.y[fits]) for line in self.lines for fits in [self.drawable(line)]]
        x, y = (np.concatenate(side) for side in zip(*points, strict=True))
        return (
            self.x_range or _non_empty_range(x.min(), x.max(), log=self.x_log, margin=0.0),
            self.y_range or _non_empty_range(y.min(), y.max(), log=self.y_log, margin=0.06),
        )


def thinned(line: Line, most: int = _MAX_POINTS) -> Line:
    """Return a line of few points that looks the same: of each part its first, lowest, highest and last point."""
    if len(line.x) <= most:
        return line
    kept: set[int] = set()
    for part in np.array_split(np.arange(len(line.x)), max(1, most // 4)):
        finite = part[np.isfinite(line.y[part])]
        kept |= {int(part[0]), int(part[-1])}
        if len(finite):
            kept |= {int(finite[line.y[finite].argmin()]), int(finite[line.y[finite].argmax()])}
    order = np.array(sorted(kept))
    return Line(line.name, line.x[order], line.y[order], line.steps, line.filled, line.dots)


def ticks(low: float, high: float, *, log: bool = False, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers in ``low``..``high``; on a logarithmic axis powers of ten where it has two.

    Args:
        low, high: of the axis; above 0 on a logarithmic one.
        log: whether the axis is logarithmic.
        count: how many are wanted.
    """
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        if last > first:
            step = -(-(last - first) // max(1, count))
            return [10.0**power for power in range(first, last + 1, step)]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * (1 - 1e-9))
    begin = math.ceil(low / step - 1e-9)
    marks = [number * step for number in range(begin, math.floor(high / step + 1e-9) + 1)]
    return [mark for mark in marks if mark > 0] if log else marks


def tick_text(value: float) -> str:
    """Return a number as short as it can be read."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-2:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}"


def _non_empty_range(low: float, high: float, *, log: bool, margin: float) -> tuple[float, float]:
    """Return a range around ``low``..``high`` that is not empty."""
    low, high = float(low), float(high)
    if log:
        low, high = (low / 2, high * 2) if high <= low * 1.01 else (low, high)
        factor = 10 ** (margin * math.log10(high / low)) if high / low < math.inf else 1.0
        return max(low / factor, 1e-300), min(high * factor, 1e300)
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
        half = max(0.5, abs(high) / 10)
        low, high = low - half, high + half
    gap = margin * (high - low)
    return low - gap, high + gap
