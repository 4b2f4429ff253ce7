"""Experiment tracker that writes its calls to OUTPUT_DIR/tracking/calls.jsonl, with faults named in TRACKING.TAGS."""

import errno
import json
import os
import time
from pathlib import Path

from fastamp.utils.trackers import LOGGER_REGISTRY, Tracker


@LOGGER_REGISTRY.register("file")
class FileTracker(Tracker):
    """Tracker with faults: ``"raise in start"``, ``"hang in log 5"`` (iteration 5), ``"exit in finish"``, ..."""

    name = "file"
    package = "json"
    install = "pip install nothing"
    fix = "set nothing"

    def start(self, run):
        self._path, self._faults = run.local_folder / "calls.jsonl", run.tags
        self._fail("start")
        new = f"run{len(read_calls(run.folder))}"
        self._write("start", vars(run))
        return run.run_id or new, "nowhere"

    def log(self, iteration, metrics):
        self._fail(f"log {iteration}")
        self._write("log", {"iteration": iteration, **metrics})

    def log_file(self, path):
        self._fail("log_file")
        self._write("log_file", {"name": path.name, "size": path.stat().st_size})

    def finish(self, status):
        self._fail("finish")
        self._write("finish", status)

    def _write(self, method, content):
        with self._path.open("a") as file:
            file.write(json.dumps([method, content]) + "\n")

    def _fail(self, method):
        for fault in self._faults:
            how, _, where = fault.partition(" in ")
            if where not in (method, method.split()[0]):
                continue
            if how == "raise":
                raise ConnectionError("the service is down")
            if how == "fill disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            if how == "exit":
                os._exit(7)
            time.sleep(600 if how == "hang" else 0.05)


class MissingTracker(FileTracker):
    """Tracker whose package is not installed."""

    name = package = "missing_package"


LOGGER_REGISTRY.register("missing")(MissingTracker)


def read_calls(output_dir):
    """Return the calls as (method, content)."""
    path = Path(output_dir) / "tracking/calls.jsonl"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
