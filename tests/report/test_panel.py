"""Chart data: ticks, reduction of the number of points, axis ranges; and the training history."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastamp.report.history import read_history
from fastamp.report.page import templates
from fastamp.report.panel import Line, Panel, thinned, tick_text, ticks
from fastamp.report.svg import draw
from fastamp.utils.errors import DataError


@given(low=st.floats(-1e9, 1e9), relative_width=st.floats(1e-5, 1e5))
def test_chart_ticks_are_within_the_axis_range(low, relative_width):
    width = relative_width * max(abs(low), 1e-6)
    high = low + width
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 8
    assert all(low - 1e-6 * width <= mark <= high + 1e-6 * width for mark in marks)


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten():
    assert ticks(2e-5, 1, log=True) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert ticks(3, 8, log=True) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.25, "0.25"), (1e-4, "1e-4"), (1.25e-3, "1.25e-3"), (65536, "65.54k"), (2e6, "2e6"), (20, "20")],
)
def test_tick_labels_of_large_and_small_numbers_are_short(value, text):
    assert tick_text(value) == text


def test_thinned_line_keeps_extrema_and_endpoints():
    y = np.random.default_rng(0).random(100_000)
    y[77_777], y[3], y[50_000] = 9.0, math.nan, -5.0
    line = thinned(Line("", np.arange(100_000.0), y))
    assert len(line.x) <= 300 and np.nanmax(line.y) == 9 and np.nanmin(line.y) == -5
    assert (line.x[0], line.x[-1]) == (0, 99_999)


def test_chart_svg_contains_no_nan_or_inf_for_non_finite_points(subtests):
    ys = [[1.0], [0.0, 0.0], [math.nan, 3.0, math.nan], [1e300, 1.0], [5.0, 5.0, 5.0]]
    for y, log in itertools.product(ys, [False, True]):
        with subtests.test(y=y, log=log):
            panel = Panel("t", "x", "y", [Line("a", np.arange(len(y)) + 1.0, np.array(y))], y_log=log)
            text = templates().get_template("macros.html").module.chart(draw(panel))
            assert "nan" not in text and "inf" not in text
            assert ("No data" in text) == (log and not any(value > 0 for value in y))


def test_read_history_skips_incomplete_lines_and_non_numbers(tmp_path):
    path = tmp_path / "metrics.json"
    rows = [{"iteration": 5, "a": 2, "b": None}, {"iteration": 1, "a": 1.5, "flag": True, "text": "x"}, [1], {"a": 3}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 9, "a"')
    history = read_history(path)
    assert history.series["a"] == [(1, 1.5), (5, 2.0)] and set(history.series) == {"a", "b"}
    assert history.latest("a") == 2 and history.latest("b") is None and history.latest("c") is None
    with pytest.raises(DataError, match="nothing.json"):
        read_history(tmp_path / "nothing.json")


def test_axis_of_a_single_small_value_shows_it():
    low, high = Panel("", "", "", [Line("rate", np.array([8.0]), np.array([8.3e-4]))]).bounds()[1]
    assert 7e-4 < low < 8.3e-4 < high < 1e-3
