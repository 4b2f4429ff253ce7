"""Process of an experiment tracker, and the writer that sends metrics to it."""

import json
import signal
import sys
import time
from pathlib import Path

import file_tracker
import pytest
from file_tracker import read_calls

from fastamp.utils.trackers import TrackedRun
from fastamp.utils.trackers.tracker_process import TrackerProcess


def logged(folder):
    return [content for method, content in read_calls(folder) if method == "log"]


def start_process(folder, *faults, timeout=30.0):
    state = folder / "tracking/file.json"
    state.parent.mkdir()
    run = TrackedRun("project", "name", "", list(faults), {}, str(folder))
    return TrackerProcess(file_tracker.FileTracker, run, state=state, artifacts=[], timeout=timeout)


@pytest.mark.integration
def test_writing_to_a_process_that_does_not_read_returns(tmp_path):
    """The lines exceed the size of a pipe by far."""
    writer = start_process(tmp_path, "hang in start", timeout=0.5)
    process = writer._process
    for iteration in range(3000):
        writer.write(iteration, {"loss": 1.0, "nan": float("nan"), "layer": "text", "padding" * 20: 2.0})
    writer.close()
    writer.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.integration
def test_all_lines_arrive_after_a_slow_start(tmp_path):
    writer = start_process(tmp_path, "sleep in start")
    for iteration in range(3000):
        writer.write(iteration, {"loss": 0.5, "nan": float("nan"), "layer": "text"})
    writer.close()
    assert logged(tmp_path) == [{"iteration": iteration, "loss": 0.5} for iteration in range(3000)]
    assert json.loads((tmp_path / "tracking/file.json").read_text()) == {"id": "run0"}


@pytest.mark.integration
def test_process_does_not_import_torch(tmp_path):
    writer = start_process(tmp_path)
    writer.write(0, {"loss": 0.5})
    deadline = time.monotonic() + 60
    while not logged(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    libraries = Path(f"/proc/{writer._process.pid}/maps").read_text() if sys.platform == "linux" else ""
    writer.close()
    assert "libtorch" not in libraries and logged(tmp_path)
