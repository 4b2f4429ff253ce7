"""Training metrics: collected without synchronizing with the device, and written once per log period."""

import itertools
import json
import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fastamp.utils.errors import writing
from fastamp.utils.files import write_atomically


class MetricStore:
    """Buffer for metrics between two writes. Device tensors are summed on the device and copied once, in ``flush``."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._latest: dict[str, Any] = {}

    def average(self, **values: float | torch.Tensor) -> None:
        """Add values to the running means of metrics; each ``flush`` restarts the means."""
        for name, value in values.items():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def latest(self, **values: float | int | None) -> None:
        """Store the most recent values of metrics; ``flush`` returns only the last value of each."""
        self._latest |= values

    def flush(self) -> dict[str, float]:
        """Return all metrics and clear the store."""
        names = list(self._sums)
        on_device = [name for name in names if isinstance(self._sums[name], torch.Tensor)]
        values = dict(self._sums)
        if on_device:
            stacked = torch.stack([self._sums[name].float().reshape(()) for name in on_device])
            values |= dict(zip(on_device, stacked.tolist(), strict=True))
        metrics = {name: float(values[name]) / self._counts[name] for name in names} | self._latest
        self._sums, self._counts, self._latest = {}, {}, {}
        return metrics


class UnwrittenMetrics:
    """New metrics of FastReID's ``get_event_storage()``, for ``writer.write()`` in a custom training loop.

    Args:
        window_size: number of values whose median is written, for metrics that are smoothed.
    """

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size
        self._last = -1

    def write_to(self, writer: Any) -> None:
        """Write the metrics recorded since the last call, by iteration."""
        from fastamp.compat.events import get_event_storage

        rows: dict[int, dict[str, float]] = {}
        for name, (value, iteration) in get_event_storage().latest_with_smoothing_hint(self._window_size).items():
            if iteration > self._last:
                rows.setdefault(iteration, {})[name] = value
        for iteration in sorted(rows):
            writer.write(iteration, rows[iteration])
        self._last = max(rows, default=self._last)


class JSONWriter:
    """Writer that appends metrics to ``metrics.json``, one JSON object per line.

    Args:
        path: path of the file.
        start_iter: first iteration. Existing lines from this iteration on are removed, so that the file of a resumed
            run contains each iteration once. Default 0.
        window_size: see ``UnwrittenMetrics``. Default 20.
    """

    def __init__(self, path: str | Path, window_size: int = 20, *, start_iter: int = 0) -> None:
        self.path = Path(path)
        self._unwritten = UnwrittenMetrics(window_size)
        lines = [] if start_iter == 0 else _lines_before(self.path, start_iter)
        write_atomically(self.path, lambda file: file.write("".join(lines).encode()))
        self._file = _AppendedFile(self.path)

    def write(self, iteration: int | None = None, metrics: dict[str, Any] | None = None) -> None:
        """Append one line. Non-finite numbers become null. Without arguments, see ``UnwrittenMetrics``."""
        if metrics is None:
            return self._unwritten.write_to(self)
        row = {key: _plain(value) for key, value in {"iteration": iteration, **metrics}.items()}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_before(path: Path, start_iter: int) -> list[str]:
    """Read the complete lines of ``path`` with an iteration below ``start_iter``."""
    lines = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            before = json.loads(line)["iteration"] < start_iter
        except (ValueError, KeyError, TypeError):
            continue  # truncated by a kill, or corrupted by a system crash
        if before and line.endswith("\n"):
            lines.append(line)
    return lines


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorboardXWriter:
    """Writer that saves metrics as TensorBoard scalars.

    TensorBoard's own writer is not used: it writes in a background thread, so a full disk could not be reported as a
    user error.

    Args:
        log_dir: folder of the event files.
        start_iter: first iteration. TensorBoard discards existing values from this iteration on. Default 0.
        window_size: see ``UnwrittenMetrics``. Default 20.
    """

    def __init__(self, log_dir: str | Path, window_size: int = 20, *, start_iter: int = 0) -> None:
        self._unwritten = UnwrittenMetrics(window_size)
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = _AppendedFile(Path(log_dir) / name)
        self._records = RecordWriter(self._file)
        self._append(file_version="brain.Event:2")
        if start_iter > 0:
            self._append(step=start_iter, session_log=SessionLog(status=SessionLog.START))

    def write(self, iteration: int | None = None, metrics: dict[str, Any] | None = None) -> None:
        """Write the finite numbers in ``metrics``, and skip other values.

        Without arguments, see ``UnwrittenMetrics``.
        """
        if metrics is None:
            return self._unwritten.write_to(self)
        numbers = {
            name: value for name, value in metrics.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._append(step=iteration, summary=self._summary(value=values))

    def _append(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_numbers = itertools.count()


class _AppendedFile:
    """File with atomic appends: an incomplete write is undone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            WriteError: if the bytes cannot be written, e.g. because the disk is full.
        """
        with writing(self.path):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), size)
                raise

    def close(self) -> None:
        self._file.close()
