"""Process of an experiment tracker: receives the metrics of a run on stdin and passes them to the service.

Messages in both directions are lines of JSON. The first line on stdin describes the tracker and the run; the last line
contains the status. If stdin ends without a status, the training process was killed.
"""

import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastamp.utils.files import write_atomically
from fastamp.utils.signals import STOP_SIGNALS
from fastamp.utils.trackers.base import TrackedRun, Tracker


def main() -> None:
    """Run the tracker until the training ends. Output of the service's package goes to stderr."""
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for number in STOP_SIGNALS:  # the training process decides when this process ends
        signal.signal(number, signal.SIG_IGN)

    def send(**message: str) -> None:
        with suppress(BrokenPipeError):  # the training process was killed
            print(json.dumps(message), file=messages, flush=True)

    _run(send)
    # Without handlers of the service's package, which may wait for a connection.
    os._exit(0)


def _run(send: Callable[..., None]) -> None:
    failed = False

    def attempt(action: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the tracker; report only the first error."""
        nonlocal failed
        try:
            return function(*args)
        except (Exception, SystemExit) as error:
            print(f"cannot {action}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not failed:
                send(failed=action, error=f"{type(error).__name__}: {error}")
            failed = True

    first = json.loads(sys.stdin.readline())
    run = TrackedRun(**first["run"])
    tracker = attempt("load the tracker", _load, first["module"], first["class"], first["file"])
    started = attempt("start the run", tracker.start, run) if tracker is not None else None
    if started is None:
        return
    run_id, place = started
    content = json.dumps({"id": run_id}).encode() + b"\n"
    attempt("store the run ID", write_atomically, Path(first["state"]), lambda file: file.write(content))
    send(started=run_id, place=place)
    status, files = "interrupted", []
    for line in sys.stdin:
        message = json.loads(line)
        if "status" in message:
            status, files = message["status"], message["files"]
            break
        attempt("log the metrics", tracker.log, message["iteration"], message["metrics"])
    else:
        timer = threading.Timer(first["timeout"], os._exit, (1,))
        timer.daemon = True
        timer.start()
    for file in files:
        attempt(f"upload {Path(file).name}", tracker.log_file, Path(file))
    attempt("end the run", tracker.finish, status)


def _load(module: str, name: str, file: str) -> Tracker:
    """Create the tracker of a class; a plugin, which has no importable module, is loaded from its file."""
    if module.startswith("fastamp_plugin_"):
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec and spec.loader, file
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(importlib.import_module(module), name)()  # the name of a plugin's module has slashes
