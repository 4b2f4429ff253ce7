"""FastReID's event storage: metrics that hooks, models and custom training loops record and read."""

import functools
import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fastamp.utils.env import peak_memory_mb
from fastamp.utils.progress import format_duration

if TYPE_CHECKING:
    from fastamp.utils.events import MetricStore

logger = logging.getLogger(__name__)

_STORAGES: list["EventStorage"] = []
_MAX_VALUES = 1000


class HistoryBuffer:
    """Most recent 1000 values of a metric. Device tensors are copied to the host when they are read."""

    def __init__(self) -> None:
        self._values: deque[tuple[Any, int]] = deque(maxlen=_MAX_VALUES)

    def update(self, value: Any, iteration: int) -> None:
        """Append a value."""
        self._values.append((value.detach() if isinstance(value, torch.Tensor) else value, iteration))

    def values(self) -> list[tuple[float, int]]:
        """Return ``(value, iteration)`` of the values."""
        return [(float(value), iteration) for value, iteration in self._values]

    def latest(self) -> float:
        """Return the last value."""
        return float(self._values[-1][0])

    def last_iteration(self) -> int:
        """Return the iteration of the last value."""
        return self._values[-1][1]

    def _last(self, window_size: int) -> list[float]:
        return [float(value) for value, _ in list(self._values)[-window_size:]]

    def median(self, window_size: int) -> float:
        """Return the median of the last ``window_size`` values."""
        return statistics.median(self._last(window_size))

    def avg(self, window_size: int) -> float:
        """Return the mean of the last ``window_size`` values."""
        return statistics.fmean(self._last(window_size))

    def global_avg(self) -> float:
        """Return the mean of all values, at most the last 1000."""
        return self.avg(_MAX_VALUES)


class EventStorage:
    """Metrics of a training run, by name.

    In a run of ``DefaultTrainer``, ``trainer.storage`` and ``get_event_storage()`` return the storage of the run.
    Values that are put into it appear in the console, in ``metrics.json`` and in TensorBoard. A custom training loop
    creates its own storage:

        with EventStorage(start_iter) as storage:
            for storage.iter in range(start_iter, max_iter):
                ...
                storage.put_scalar("total_loss", loss)

    Args:
        start_iter: first iteration. Default 0.
        metrics: metrics of a trainer, to which the values are passed on. Default None.
    """

    def __init__(self, start_iter: int = 0, *, metrics: "MetricStore | None" = None) -> None:
        self.iter, self.epoch = start_iter, 0
        self._metrics, self._prefix = metrics, ""
        self._history: dict[str, HistoryBuffer] = defaultdict(HistoryBuffer)
        self._hints: dict[str, bool] = {}

    @property
    def iteration(self) -> int:
        """Current iteration."""
        return self.iter

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True) -> None:
        """Record a value.

        Args:
            name: name of the metric.
            value: number, or a tensor with one element, which is not copied to the host here.
            smoothing_hint: if True, the trainer writes the mean over the log period, else the last value. Default True.
        """
        name = self._prefix + name
        self.record(name, value)
        self._hints[name] = smoothing_hint
        if self._metrics is not None:
            (self._metrics.average if smoothing_hint else self._metrics.latest)(**{name: value})

    def put_scalars(self, *, smoothing_hint: bool = True, **kwargs: Any) -> None:
        """Record several values; see ``put_scalar``."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint)

    def record(self, name: str, value: Any) -> None:
        """Add a value to the history of a metric, without passing it on to the trainer."""
        self._history[name].update(value, self.iter)

    def history(self, name: str) -> HistoryBuffer:
        """Return the values of a metric.

        Raises:
            KeyError: if the metric has no value.
        """
        if name not in self._history:
            raise KeyError(f"no value of metric {name!r}; metrics: {', '.join(self._history) or 'none'}")
        return self._history[name]

    def histories(self) -> dict[str, HistoryBuffer]:
        """Return all metrics, by name."""
        return self._history

    def latest(self) -> dict[str, tuple[float, int]]:
        """Return ``(last value, iteration)`` of each metric."""
        return {name: (history.latest(), history.last_iteration()) for name, history in self._history.items()}

    def latest_with_smoothing_hint(self, window_size: int = 20) -> dict[str, tuple[float, int]]:
        """Return ``latest()``, with the median of the last ``window_size`` values for metrics to be smoothed."""
        return {
            name: (
                history.median(window_size) if self._hints.get(name, True) else history.latest(),
                history.last_iteration(),
            )
            for name, history in self._history.items()
        }

    def smoothing_hints(self) -> dict[str, bool]:
        """Return the smoothing hint of each metric."""
        return self._hints

    def step(self) -> None:
        """Increase the iteration by one."""
        self.iter += 1

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Context manager that adds the prefix ``name/`` to the names of metrics."""
        before, self._prefix = self._prefix, name.rstrip("/") + "/"
        try:
            yield
        finally:
            self._prefix = before

    def __enter__(self) -> "EventStorage":
        _STORAGES.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _STORAGES.remove(self)


def get_event_storage() -> EventStorage:
    """Return the storage of the innermost ``with EventStorage(...)`` block, else that of the running trainer.

    Raises:
        AssertionError: if there is neither.
    """
    from fastamp.engine.train_loop import running_trainers

    if _STORAGES:
        return _STORAGES[-1]
    assert running_trainers, "get_event_storage() was called outside a training run and `with EventStorage(...)`"
    return running_trainers[-1].storage


class EventWriter:
    """Base class of writers for custom training loops, and for ``build_writers`` of a trainer.

    A trainer puts the metrics of each log period and evaluation into its storage before it calls ``write``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "write" in vars(cls):
            cls.write = _accepts_metrics(cls.write)

    def write(self) -> None:
        """Write the new metrics of ``get_event_storage()``."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the writer."""


def _accepts_metrics(write: Callable[[Any], None]) -> Callable[..., None]:
    """Decorate ``write()`` of a writer, so that a trainer can call ``write(iteration, metrics)``."""

    @functools.wraps(write)
    def write_metrics(self: Any, iteration: int | None = None, metrics: dict[str, Any] | None = None) -> None:
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float) and "loss" not in name:  # the storage contains the losses
                get_event_storage().record(name, value)
        write(self)

    return write_metrics


class CommonMetricPrinter(EventWriter):
    """Writer that logs losses, learning rate, time and memory of a custom training loop.

    Args:
        max_iter: number of iterations, for the time left.
    """

    def __init__(self, max_iter: int) -> None:
        self._max_iter = max_iter

    def write(self) -> None:
        """Log one line with the medians of the last 20 losses."""
        storage = get_event_storage()
        parts = [f"iter {storage.iter + 1}/{self._max_iter}"]
        histories = storage.histories()
        parts += [f"{name} {history.median(20):.4g}" for name, history in histories.items() if "loss" in name]
        if "lr" in histories:
            parts.append(f"lr {histories['lr'].latest():.2e}")
        if "time" in histories:
            seconds = histories["time"].median(_MAX_VALUES)
            parts.append(f"time {seconds:.4f} s  eta {format_duration(seconds * (self._max_iter - storage.iter - 1))}")
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        parts.append(f"mem {peak_memory_mb(device):.0f} MiB")
        logger.info("%s", "  ".join(parts))
