"""Metrics of a run: collected without waiting for the device, written once a log period."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from fastamp.utils.checkpoint import write_atomically


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
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Append one line; what is not finite is written as null."""
        row = {key: _plain(value) for key, value in {"iteration": iteration, **metrics}.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_before(path: Path, start_iter: int) -> list[str]:
    """Return the whole lines of ``path`` whose iteration is below ``start_iter``."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        try:
            before = json.loads(line)["iteration"] < start_iter
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut short
        if before and line.endswith("\n"):
            kept.append(line)
    return kept


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorboardXWriter:
    """Write metrics as TensorBoard scalars.

    Args:
        log_dir: the folder of the event files.
        start_iter: the run's first iteration; TensorBoard drops what a former run wrote from there on.
    """

    def __init__(self, log_dir: str | Path, *, start_iter: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(log_dir), purge_step=start_iter if start_iter > 0 else None)

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Write every number that is finite."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
