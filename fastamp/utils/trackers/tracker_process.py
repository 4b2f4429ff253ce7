"""Writer that passes metrics to the process of an experiment tracker, without waiting for it."""

import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastamp.utils.errors import system_cause
from fastamp.utils.trackers.base import FOLDER, TrackedRun, Tracker

logger = logging.getLogger(__name__)

_READ_SIZE = 2**16


def start_tracker(tracker: type[Tracker], cfg: Any) -> "TrackerProcess | None":
    """Start the process of a tracker; if that fails, log a warning and return None.

    Args:
        tracker: class of the tracker.
        cfg: config of the run.
    """
    if importlib.util.find_spec(tracker.package) is None:
        logger.warning(
            "LOGGERS: %s is not installed; the run is not tracked by it.\n  fix: %s, or remove %s from LOGGERS",
            tracker.package,
            tracker.install,
            tracker.name,
        )
        return None
    folder = Path(cfg.OUTPUT_DIR).absolute()
    state = folder / FOLDER / f"{tracker.name}.json"
    run = TrackedRun(
        project=cfg.TRACKING.PROJECT,
        name=cfg.TRACKING.NAME or folder.name,
        group=cfg.TRACKING.GROUP,
        tags=list(cfg.TRACKING.TAGS),
        config={key.path: value for key, value in cfg.keys_below()},
        folder=str(folder),
        run_id=_read_id(state),
    )
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        return TrackerProcess(
            tracker,
            run,
            state=state,
            artifacts=[folder / name for name in cfg.TRACKING.ARTIFACTS],
            timeout=cfg.TRACKING.TIMEOUT,
        )
    except OSError as error:
        logger.warning(
            "%s: cannot start its process (%s); the run is not tracked by it.\n"
            "  fix: make sure that %s is a writable folder, or remove %s from LOGGERS",
            tracker.name,
            system_cause(error),
            state.parent,
            tracker.name,
        )
        return None


def _read_id(state: Path) -> str:
    """Read the ID of the run to continue; empty if there is none. A new run has moved the file of an earlier run."""
    try:
        return str(json.loads(state.read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class TrackerProcess:
    """Writer that passes metrics to a tracker in another process.

    No method raises an error because of the service or waits for it, except for ``close``, which waits at most
    ``timeout`` seconds. Only the first problem is logged as a warning.

    Args:
        tracker: class of the tracker.
        run: the run.
        state: file for the ID of the run; the output of the process is written next to it.
        artifacts: files to upload at the end, unless the run is interrupted; missing files are skipped.
        timeout: seconds to wait for the service: until a warning after the start, and for ``close``.

    Raises:
        OSError: if the process cannot be started.
    """

    def __init__(
        self, tracker: type[Tracker], run: TrackedRun, *, state: Path, artifacts: list[Path], timeout: float
    ) -> None:
        self.tracker, self.artifacts, self.timeout = tracker, artifacts, timeout
        self.status = "finished"
        self._log = state.with_suffix(".log")
        self._unsent = self._unread = b""
        self._started = self._warned = False
        self._began = time.monotonic()
        path = [folder for folder in sys.path if isinstance(folder, str)]
        code = f"import sys; sys.path[:] = {path!r}; from fastamp.utils.trackers.child import main; main()"
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,  # Ctrl-C in a terminal only reaches the training process
            )
        assert process.stdin and process.stdout
        self._process: subprocess.Popen[bytes] | None = process
        self._input, self._output = process.stdin, process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._send(
            {
                "module": tracker.__module__,
                "class": tracker.__qualname__,
                "file": getattr(sys.modules.get(tracker.__module__), "__file__", None) or "",
                "run": vars(run),
                "state": str(state),
                "timeout": timeout,
            }
        )

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Pass on the finite numbers in ``metrics``."""
        if self._process is None:
            return
        numbers = {
            name: value for name, value in metrics.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }
        self._send({"iteration": iteration, "metrics": numbers})
        self._receive()
        if not self._started and time.monotonic() - self._began > self.timeout:
            self._warn_slow()

    def set_status(self, status: str) -> None:
        """Set the status of the run for ``close``: ``"finished"`` (default), ``"failed"`` or ``"interrupted"``."""
        self.status = status

    def close(self) -> None:
        """End the run and wait for the uploads. Can be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._warned and not self._started:
            return self._kill(process)
        files = [str(path) for path in self.artifacts if path.is_file()] if self.status != "interrupted" else []
        self._unsent += _line({"status": self.status, "files": files})
        if files:
            names = ", ".join(Path(file).name for file in files)
            logger.info("%s: ending the run, with %s, in at most %g s", self.tracker.name, names, self.timeout)
        try:
            output, _ = process.communicate(self._unsent, timeout=self.timeout)
            self._handle(output)
            if process.returncode:
                self._warn(f"its process ended with exit code {process.returncode}")
        except subprocess.TimeoutExpired as expired:
            self._handle(expired.stdout or b"")
            self._warn_slow()
        finally:
            self._kill(process)

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message, as far as the pipe has space; the rest is sent with the next message."""
        self._unsent += _line(message)
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._input.fileno(), self._unsent) :]

    def _receive(self) -> None:
        """Handle the messages of the process so far."""
        with suppress(BlockingIOError):
            while data := os.read(self._output.fileno(), _READ_SIZE):
                self._handle(data)
        process = self._process
        if process is not None and (code := process.poll()) is not None:
            self._process = None
            self._handle(process.communicate()[0])
            self._warn(f"its process ended with exit code {code}")
            self._kill(process)

    def _handle(self, data: bytes) -> None:
        """Log the messages in ``data``, which may end within a message."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):  # printed by another package while Python started
                continue
            message = json.loads(line)
            if "started" in message:
                self._started = True
                logger.info("%s: run %s, %s", self.tracker.name, message["started"], message["place"])
            else:
                # The whole text is in the log.
                self._warn(f"cannot {message['failed']}: {message['error'].splitlines()[0].rstrip('.')}")

    def _warn_slow(self) -> None:
        action = "respond" if self._started else "start the run"
        problem = f"the service did not {action} within {self.timeout:g} s (TRACKING.TIMEOUT)"
        self._warn(problem, fix="set TRACKING.TIMEOUT to a longer time" if self._started else "")

    def _warn(self, problem: str, *, fix: str = "") -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: %s. The training is not affected, and metrics.json is complete.\n  fix: %s\n  log: %s",
                self.tracker.name,
                problem,
                fix or ("check the connection and the log" if self._started else self.tracker.fix),
                self._log,
            )

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End the process and the processes that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (self._input, self._output):
            pipe.close()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"
