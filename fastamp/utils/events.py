"""Metrics of a run: collected without waiting for the device, written once a log period."""

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
    """Collect metrics between two writes.

    Device tensors are added up on the device and read once, in ``flush``.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._latest: dict[str, Any] = {}

    def average(self, **values: float | torch.Tensor) -> None:
        """Add values whose mean since the last flush is written."""
        for name, value in values.items():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def latest(self, **values: float | int | None) -> None:
        """Set values of which the newest is written."""
        self._latest |= values

    def flush(self) -> dict[str, float]:
        """Return all metrics and start anew."""
        names = list(self._sums)
        on_device = [name for name in names if isinstance(self._sums[name], torch.Tensor)]
        values = dict(self._sums)
        if on_device:
            stacked = torch.stack([self._sums[name].float().reshape(()) for name in on_device])
            values |= dict(zip(on_device, stacked.tolist(), strict=True))
        metrics = {name: float(values[name]) / self._counts[name] for name in names} | self._latest
        self._sums, self._counts, self._latest = {}, {}, {}
        return metrics


class JSONWriter:
    """Append metrics to a file of JSON lines, ``metrics.json``.

    Args:
        path: the file.
        start_iter: the run's first iteration; lines of a former run from there on are removed, so that a resumed
            run has each iteration once.
    """

    def __init__(self, path: str | Path, *, start_iter: int = 0) -> None:
        self.path = Path(path)
        kept = [] if start_iter == 0 else _lines_before(self.path, start_iter)
        write_atomically(self.path, lambda file: file.write("".join(kept).encode()))
        self._file = _AppendedFile(self.path)

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Append one line; what is not finite is written as null."""
        row = {key: _plain(value) for key, value in {"iteration": iteration, **metrics}.items()}
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_before(path: Path, start_iter: int) -> list[str]:
    """Return the whole lines of ``path`` whose iteration is below ``start_iter``."""
    kept = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            before = json.loads(line)["iteration"] < start_iter
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut short, or a crash of the machine garbled
        if before and line.endswith("\n"):
            kept.append(line)
    return kept


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorboardXWriter:
    """Write metrics as TensorBoard scalars.

    TensorBoard's own writer does that in a thread, where a full disk could not be told from a bug.

    Args:
        log_dir: the folder of the event files.
        start_iter: the run's first iteration; TensorBoard drops what a former run wrote from there on.
    """

    def __init__(self, log_dir: str | Path, *, start_iter: int = 0) -> None:
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

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Write every number that is finite."""
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
    """A file that grows by whole pieces: of one that cannot be written nothing stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """Append the piece.

        Raises:
            WriteError: it cannot be written, e.g. because the disk is full.
        """
        with writing(self.path):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while piece:
                    piece = piece[self._file.write(piece) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), size)
                raise

    def close(self) -> None:
        self._file.close()
