"""Geometry of charts for SVG."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastamp.report.panel import Line, Panel, thinned, tick_text, ticks


@dataclass(frozen=True)
class Frame:
    """Size of a chart, edges of the plotting area in pixels from the top-left corner, and number of line colors."""

    width: int = 380
    height: int = 240
    left: int = 60
    right: int = 368
    top: int = 10
    bottom: int = 202
    colors: int = 8


FRAME = Frame()


@dataclass(frozen=True)
class Shape:
    """Contiguous part of a line.

    Attributes:
        color: index of the color.
        path: SVG path of the line.
        area: SVG path of the filled area below the line; empty if the area is not filled.
        dots: x, y and description of each marked point.
    """

    color: int
    path: str
    area: str
    dots: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Drawing:
    """Panel with the positions of its elements.

    Attributes:
        panel: chart data.
        x_ticks: position and label of each tick.
        y_ticks: position of the tick, position of the label, and label.
        shapes: contiguous parts of all lines.
        words: description of the lines for screen readers.
    """

    panel: Panel
    x_ticks: Sequence[tuple[str, str]] = ()
    y_ticks: Sequence[tuple[str, str, str]] = ()
    shapes: Sequence[Shape] = ()
    words: str = ""


def draw_panels(panels: Sequence[Panel]) -> list[Drawing]:
    """Compute the geometry of several panels; see ``draw``."""
    return [draw(panel) for panel in panels]


def draw(panel: Panel) -> Drawing:
    """Compute the geometry of a panel; an empty panel has no elements."""
    if panel.empty:
        return Drawing(panel)
    (x_low, x_high), (y_low, y_high) = panel.bounds()
    to_x = _scale(x_low, x_high, FRAME.left, FRAME.right, log=panel.x_log)
    to_y = _scale(y_low, y_high, FRAME.bottom, FRAME.top, log=panel.y_log)
    y_ticks = [(to_y(mark), tick_text(mark)) for mark in ticks(y_low, y_high, log=panel.y_log)]
    return Drawing(
        panel,
        x_ticks=[(_number(to_x(mark)), tick_text(mark)) for mark in ticks(x_low, x_high, log=panel.x_log)],
        y_ticks=[(_number(y), _number(y + 4), text) for y, text in y_ticks],
        shapes=[
            shape
            for number, line in enumerate(panel.lines)
            for shape in _shapes(panel, thinned(line), number, to_x, to_y)
        ],
        words=_describe_lines(panel),
    )


def _shapes(
    panel: Panel, line: Line, number: int, to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> Iterator[Shape]:
    """Yield the contiguous parts of a line."""
    for run in _runs(panel.drawable(line)):
        x, y = line.x[run], line.y[run]
        points = [(to_x(a), to_y(b)) for a, b in zip(x, y, strict=True)]
        if line.steps:
            points = [points[0], *(p for a, b in itertools.pairwise(points) for p in ((b[0], a[1]), b))]
        path = "M" + "L".join(f"{_number(a)} {_number(b)}" for a, b in points)
        ends = f"L{_number(points[-1][0])} {FRAME.bottom}L{_number(points[0][0])} {FRAME.bottom}Z"
        dots = []
        if line.dots or len(points) == 1:
            for (a, b), value_x, value_y in zip(points, x, y, strict=False):
                dots.append((_number(a), _number(b), f"{line.name}: {value_y:.4g} at {value_x:.6g}"))
        yield Shape(number % FRAME.colors, path, f"{path}{ends}" if line.filled else "", dots)


def _runs(fits: np.ndarray) -> Iterator[slice]:
    """Yield the slices of consecutive drawable points."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], fits, [False])).astype(int)))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield slice(start, stop)


def _scale(low: float, high: float, begin: float, end: float, *, log: bool) -> Callable[[float], float]:
    """Create a function that maps ``low``..``high`` to ``begin``..``end``."""
    measure: Callable[[float], float] = math.log10 if log else float
    first, last = measure(low), measure(high)
    # Coordinates far outside of the plotting area are clipped.
    return lambda value: begin + (end - begin) * min(3.0, max(-2.0, (measure(value) - first) / (last - first)))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _describe_lines(panel: Panel) -> str:
    """Describe the lines for screen readers."""
    words = []
    for line in panel.lines:
        y = line.y[panel.drawable(line)]
        if len(y):
            words.append(f"{line.name}: from {y[0]:.4g} to {y[-1]:.4g}, lowest {y.min():.4g}, highest {y.max():.4g}")
    return "; ".join(words)
