"""Charts as SVG inside a page, whose colours are the page's, light or dark."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from fastamp.report.markup import Markup, join, tag
from fastamp.report.panel import Line, Panel, thinned, tick_text, ticks

WIDTH, HEIGHT = 380, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 10, 38
COLOURS = 8


def chart(panel: Panel) -> Markup:
    """Return a panel as a figure: title, SVG, legend and note; a sentence where there is nothing to draw."""
    title = tag("figcaption", panel.title)
    if panel.empty:
        return tag("figure", title, tag("p", "There is nothing to draw.", class_="note"), class_="chart")
    legend = ()
    if len(panel.lines) > 1:
        entries = [tag("li", _swatch(number), line.name) for number, line in enumerate(panel.lines)]
        legend = (tag("ul", *entries, class_="legend"),)
    note = (tag("p", panel.note, class_="note"),) if panel.note else ()
    return tag("figure", title, drawing(panel), *legend, *note, class_="chart")


def drawing(panel: Panel) -> Markup:
    """Return the SVG element of a panel that is not empty."""
    (x_low, x_high), (y_low, y_high) = panel.bounds()
    place_x = _scale(x_low, x_high, _LEFT, WIDTH - _RIGHT, log=panel.x_log)
    place_y = _scale(y_low, y_high, HEIGHT - _BOTTOM, _TOP, log=panel.y_log)
    parts: list[Markup] = []
    for mark in ticks(y_low, y_high, log=panel.y_log):
        y = place_y(mark)
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=_number(y), y2=_number(y), class_="grid"))
        parts.append(tag("text", tick_text(mark), x=_LEFT - 6, y=_number(y + 4), text_anchor="end"))
    for mark in ticks(x_low, x_high, log=panel.x_log):
        x = place_x(mark)
        bottom = HEIGHT - _BOTTOM
        parts.append(tag("line", x1=_number(x), x2=_number(x), y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(tag("text", tick_text(mark), x=_number(x), y=bottom + 17, text_anchor="middle"))
    bottom = HEIGHT - _BOTTOM
    parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(tag("text", panel.x_label, x=middle, y=HEIGHT - 5, text_anchor="middle", class_="label"))
    turned = f"translate(11 {(_TOP + HEIGHT - _BOTTOM) / 2}) rotate(-90)"
    parts.append(tag("text", panel.y_label, transform=turned, text_anchor="middle", class_="label"))
    inside = tag(
        "svg",
        *(_line(panel, thinned(line), number, place_x, place_y) for number, line in enumerate(panel.lines)),
        x=_LEFT, y=_TOP - 4, width=WIDTH - _LEFT - _RIGHT + 4, height=HEIGHT - _TOP - _BOTTOM + 6,
        viewBox=f"{_LEFT} {_TOP - 4} {WIDTH - _LEFT - _RIGHT + 4} {HEIGHT - _TOP - _BOTTOM + 6}",
    )  # fmt: skip
    return tag(
        "svg",
        tag("title", f"{panel.title}: {panel.y_label} over {panel.x_label}"),
        tag("desc", _in_words(panel)),
        *parts,
        inside,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_="drawing",
    )


def _line(
    panel: Panel, line: Line, number: int, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> Markup:
    """Return the paths and dots of one line."""
    shapes: list[Markup] = []
    style = f"c{number % COLOURS}"
    for run in _runs(panel.drawable(line)):
        x, y = line.x[run], line.y[run]
        points = [(place_x(a), place_y(b)) for a, b in zip(x, y, strict=True)]
        if line.steps:
            points = [points[0], *(p for a, b in itertools.pairwise(points) for p in ((b[0], a[1]), b))]
        path = "M" + "L".join(f"{_number(a)} {_number(b)}" for a, b in points)
        if line.filled:
            bottom = HEIGHT - _BOTTOM
            area = f"{path}L{_number(points[-1][0])} {bottom}L{_number(points[0][0])} {bottom}Z"
            shapes.append(tag("path", d=area, class_=f"area {style}"))
        shapes.append(tag("path", d=path, class_=f"line {style}"))
        if line.dots or len(points) == 1:
            for (a, b), value_x, value_y in zip(points, x, y, strict=False):
                tip = tag("title", f"{line.name}: {value_y:.4g} at {value_x:.6g}")
                shapes.append(tag("circle", tip, cx=_number(a), cy=_number(b), r=3, class_=f"dot {style}"))
    return join(shapes)


def _runs(fits: np.ndarray) -> Iterator[slice]:
    """Yield the stretches of points that have a place."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], fits, [False])).astype(int)))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield slice(start, stop)


def _scale(low: float, high: float, begin: float, end: float, *, log: bool) -> Callable[[float], float]:
    """Return the map of ``low``..``high`` to ``begin``..``end``."""
    measure: Callable[[float], float] = math.log10 if log else float
    first, last = measure(low), measure(high)
    # Far outside of what is drawn, coordinates need not grow.
    return lambda value: begin + (end - begin) * min(3.0, max(-2.0, (measure(value) - first) / (last - first)))


def _swatch(number: int) -> Markup:
    line = tag("path", d="M0 5L22 5", class_=f"line c{number % COLOURS}")
    return tag("svg", line, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _in_words(panel: Panel) -> str:
    """Return what the lines do, for who cannot see them."""
    words = []
    for line in panel.lines:
        y = line.y[panel.drawable(line)]
        if len(y):
            words.append(f"{line.name}: from {y[0]:.4g} to {y[-1]:.4g}, lowest {y.min():.4g}, highest {y.max():.4g}")
    return "; ".join(words)
