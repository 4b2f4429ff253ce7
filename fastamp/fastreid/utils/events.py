"""FastReID's event storage, the metrics that hooks, models and training loops record and read, and its writers."""

import functools
import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.engine.train_loop import TrainerBase
from fastamp.utils import events
from fastamp.utils.env import peak_memory_mb
from fastamp.utils.progress import format_duration

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

    In a run of ``DefaultTrainer``, ``trainer.storage`` and ``get_event_storage()`` return the storage of the run, see
    ``RunStorage``. A custom training loop creates its own storage:

        with EventStorage(start_iter) as storage:
            for storage.iter in range(start_iter, max_iter):
                ...
                storage.put_scalar("total_loss", loss)

    Args:
        start_iter: first iteration. Default 0.
    """

    def __init__(self, start_iter: int = 0) -> None:
        self.iter, self.epoch = start_iter, 0
        self._prefix = ""
        self._images: list[tuple[str, Any, int]] = []
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
            smoothing_hint: if True, writers write the median of the last values, and a trainer the mean over the log
                period; if False, the last value. Default True.
        """
        name = self._prefix + name
        self.record(name, value)
        self._hints[name] = smoothing_hint

    def put_scalars(self, *, smoothing_hint: bool = True, **kwargs: Any) -> None:
        """Record several values; see ``put_scalar``."""
        for name, value in kwargs.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint)

    def put_losses(self, losses: dict[str, torch.Tensor], data_time: float, prefix: str = "") -> None:
        """Record the losses of a step, their sum and the loading time of the batch, as ``_write_metrics`` does."""
        values = {name: loss.detach() for name, loss in losses.items()}
        self.put_scalars(data_time=data_time)
        self.put_scalars(**{f"{prefix}{name}": value for name, value in values.items()})
        self.put_scalar(f"{prefix}total_loss", sum(values.values()))

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        """Record an image for ``TensorboardXWriter``.

        Args:
            img_name: name of the image.
            img_tensor: (C, H, W) uint8 in 0..255, or float in 0..1; one or three channels.
        """
        self._images.append((self._prefix + img_name, img_tensor, self.iter))

    @property
    def vis_data(self) -> list[tuple[str, Any, int]]:
        """Recorded images: ``(name, image, iteration)``."""
        return self._images

    def clear_images(self) -> None:
        """Discard the recorded images."""
        self._images = []

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
    """Return the storage of the innermost ``with EventStorage(...)`` block; a trainer trains in such a block.

    Raises:
        AssertionError: if there is none.
    """
    assert _STORAGES, "get_event_storage() was called outside a training run and `with EventStorage(...)`"
    return _STORAGES[-1]


def is_active(storage: EventStorage | None) -> bool:
    """Return True within ``with storage``."""
    return storage in _STORAGES


class RunStorage(EventStorage):
    """Storage of a run: what is put into it appears in the console, ``metrics.json`` and TensorBoard.

    Args:
        loop: training loop, whose losses are recorded.

    Attributes:
        writers: those with a method ``write_image`` receive the images. Default: none.
    """

    writers: Sequence[Any] = ()

    def __init__(self, loop: TrainerBase) -> None:
        super().__init__()
        self._metrics = loop.metrics
        loop.register_hooks([_RunRecorder(self)])

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True) -> None:
        """Record a value; see ``EventStorage.put_scalar``."""
        super().put_scalar(name, value, smoothing_hint)
        (self._metrics.average if smoothing_hint else self._metrics.latest)(**{self._prefix + name: value})

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        """Write an image to TensorBoard; see ``EventStorage.put_image``."""
        for writer in self.writers:
            if hasattr(writer, "write_image"):
                writer.write_image(self.iter, self._prefix + img_name, _to_image(img_tensor))


class _RunRecorder(HookBase):
    """Set the iteration of a storage, and record the losses of each step, before other hooks are called."""

    priority = Priority.VERY_HIGH

    def __init__(self, storage: RunStorage) -> None:
        self.storage = storage

    def before_train(self) -> None:
        self.storage.iter, self.storage.epoch = self.trainer.iter, self.trainer.epoch

    before_epoch = before_step = before_train

    def after_step(self) -> None:
        for name, loss in getattr(self.trainer, "losses", {}).items():
            self.storage.record(name, loss)


def _to_image(array: Any) -> Image.Image:
    """Convert an image (C, H, W), uint8 in 0..255 or float in 0..1, to an RGB image."""
    values = np.asarray(array.detach().cpu() if isinstance(array, torch.Tensor) else array)
    if values.dtype != np.uint8:
        values = (values.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(np.broadcast_to(values, (3, *values.shape[1:])).transpose(1, 2, 0).copy())


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


class _StorageWriter:
    """Mixin of writers: ``write()`` without arguments writes the new metrics of ``get_event_storage()``."""

    _window_size, _last = 20, -1

    def write(self, iteration: int | None = None, metrics: dict[str, Any] | None = None) -> None:
        """Write the metrics of an iteration; without arguments, those recorded since the last call, by iteration."""
        if iteration is not None and metrics is not None:
            super().write(iteration, metrics)  # type: ignore[misc]
            return
        rows: dict[int, dict[str, float]] = {}
        for name, (value, number) in get_event_storage().latest_with_smoothing_hint(self._window_size).items():
            if number > self._last:
                rows.setdefault(number, {})[name] = value
        for number in sorted(rows):
            super().write(number, rows[number])  # type: ignore[misc]
        self._last = max(rows, default=self._last)


class _Writers:
    """Several writers.

    Args:
        writers: objects with ``write(iteration, metrics)``. The list may change.
    """

    def __init__(self, writers: list[Any]) -> None:
        self.writers = writers

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Write the metrics with all writers."""
        for writer in self.writers:
            writer.write(iteration, metrics)

    def close(self) -> None:
        """Do nothing: the trainer closes its writers."""


class RunWriter(_StorageWriter, _Writers):
    """Writer that passes the metrics on to the writers of a trainer, for ``hooks.PeriodicWriter``."""


class JSONWriter(_StorageWriter, events.JSONWriter):
    """Writer of ``metrics.json``; see ``fastamp.utils.events.JSONWriter``. The first ``write`` opens the file.

    Args:
        json_file: path of the file.
        window_size: number of values whose median is written, for metrics that are smoothed. Default 20.
        start_iter: first iteration. Default 0.
    """

    def __init__(self, json_file: str | Path, window_size: int = 20, *, start_iter: int = 0) -> None:
        self.path, self._start_iter, self._window_size = Path(json_file), start_iter, window_size

    def write(self, iteration: int | None = None, metrics: dict[str, Any] | None = None) -> None:
        """Write the metrics of an iteration; without arguments, those recorded since the last call, by iteration."""
        if not hasattr(self, "_file"):  # a trainer may build the writer before it moves the files of an earlier run
            events.JSONWriter.__init__(self, self.path, start_iter=self._start_iter)
        super().write(iteration, metrics)

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "_file"):
            super().close()


class TensorboardXWriter(_StorageWriter, events.TensorboardXWriter):
    """Writer of TensorBoard events; see ``fastamp.utils.events.TensorboardXWriter``.

    Args:
        log_dir: folder of the event files.
        window_size: see ``JSONWriter``. Default 20.
        options: see ``fastamp.utils.events.TensorboardXWriter``.
    """

    def __init__(self, log_dir: str | Path, window_size: int = 20, **options: Any) -> None:
        super().__init__(log_dir, **options)
        self._window_size = window_size

    def write(self, iteration: int | None = None, metrics: dict[str, Any] | None = None) -> None:
        """Write metrics; see ``JSONWriter``. Without arguments, also write the images in the storage."""
        super().write(iteration, metrics)
        if metrics is None:
            for name, image, number in get_event_storage().vis_data:
                self.write_image(number, name, _to_image(image))
            get_event_storage().clear_images()
