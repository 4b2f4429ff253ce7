"""Progress bars are drawn on terminals, but not written to files."""

import io
import logging
import re

from fastamp.utils import progress
from fastamp.utils.progress import ConsoleHandler, ProgressBar, format_duration, track


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_format_duration_omits_zero_hours_and_clamps_at_zero():
    assert format_duration(3723) == "1:02:03"
    assert format_duration(59.6) == "1:00"
    assert format_duration(-1) == "0:00"


def test_progress_bar_shows_steps_and_remaining_time():
    stream = Terminal()
    bar = ProgressBar(4, "training", done=1, stream=stream)
    bar._bar.mininterval = 0
    bar.update(2)
    bar.update(4)
    bar.close()
    bar.close()
    assert re.search(r"training: +50%\|.*\| 2/4 \[00:00<00:00", stream.getvalue())
    assert "4/4" in stream.getvalue() and stream.getvalue().endswith("\r")


def test_log_lines_are_printed_above_the_progress_bar():
    stream = Terminal()
    handler = ConsoleHandler(stream)
    bar = ProgressBar(4, "training", stream=stream)
    bar.update(2)
    stream.truncate(0)
    handler.emit(logging.makeLogRecord({"msg": "a line", "levelno": logging.INFO, "levelname": "INFO"}))
    bar.close()
    before, after = re.fullmatch(r"\0*(.*)a line\n(.*)", stream.getvalue(), re.DOTALL).groups()
    assert before.strip("\r ") == "" and before.endswith("\r")  # the bar is cleared
    assert "training:" in after  # and drawn again below the line


def test_progress_bar_is_not_written_to_a_file():
    stream = io.StringIO()
    bar = ProgressBar(4, "training", stream=stream)
    bar.update(4)
    bar.close()
    assert stream.getvalue() == ""


def test_progress_bar_ignores_steps_before_a_resume_in_the_remaining_time():
    bar = ProgressBar(100, "training", done=90, stream=io.StringIO())
    assert bar.seconds_left() == float("inf")


def test_track_yields_each_item():
    assert list(track([1, 2, 3], 3, "x")) == [1, 2, 3]


def test_a_line_is_logged_at_times_if_no_bar_is_drawn(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    bar = ProgressBar(100, "batch norm", stream=io.StringIO())
    for done in range(1, 101):
        now[0] += 1.0
        bar.update(done)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"batch norm: {done} of 100" for done in (30, 60, 90)
    ]
