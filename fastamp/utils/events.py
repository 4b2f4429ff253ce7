"""Training metrics: collected without synchronizing with the device, and written once per log period."""

import io
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastamp.utils.errors import WriteError, writing
from fastamp.utils.files import write_atomically

if TYPE_CHECKING:
    from PIL.Image import Image


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

    def latest(self, **values: float | str | None) -> None:
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


class JSONWriter:
    """Writer that appends metrics to ``metrics.json``, one JSON object per line.

    Args:
        path: path of the file.
        start_iter: first iteration. Existing lines from this iteration on are removed, so that the file of a resumed
            run contains each iteration once. Default 0.
    """

    def __init__(self, path: str | Path, *, start_iter: int = 0) -> None:
        self.path = Path(path)
        lines = [] if start_iter == 0 else _lines_before(self.path, start_iter)
        write_atomically(self.path, lambda file: file.write("".join(lines).encode()))
        self._file = _AppendedFile(self.path)

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Append one line. Non-finite numbers become null."""
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


_TAGS = {
    "loss_scale": "precision/loss_scale",
    "total_loss": "loss/total",
    "images_per_second": "speed/images_per_second",
    "time": "speed/time",
    "data_time": "speed/data_time",
    "eta_seconds": "speed/eta_seconds",
    "peak_memory_mb": "speed/peak_memory_mb",
    "grad_norm": "precision/grad_norm",
    "clip_coefficient": "precision/clip_coefficient",
    "zero_gradients": "precision/zero_gradients",
    "skip_ratio": "precision/skip_ratio",
    "skipped_total": "precision/skipped_total",
    "skipped_in_a_row": "precision/skipped_in_a_row",
    "largest_activation": "precision/largest_activation",
    "activation_limit_share": "precision/activation_limit_share",
}


def tensorboard_tag(name: str, datasets: Sequence[str] = ()) -> str:
    """Return the TensorBoard tag of a metric; TensorBoard groups tags by the part before the slash.

    Losses are in the group ``loss`` (``loss_cls`` -> ``loss/cls``), metrics of test sets in ``eval``, numerical values
    of mixed precision in ``precision`` and times in ``speed``. Other names are unchanged.

    Args:
        name: name in ``metrics.json``, e.g. ``Market1501/mAP``.
        datasets: names of the test sets. The tag contains the name only if there are several: ``eval/mAP``,
            ``eval/Market1501/mAP``.
    """
    if name in _TAGS:
        return _TAGS[name]
    for dataset in datasets:
        if name.startswith(f"{dataset}/"):
            return f"eval/{name if len(datasets) > 1 else name.removeprefix(f'{dataset}/')}"
    return f"loss/{name.removeprefix('loss_')}" if name.startswith("loss_") else name


class TensorboardXWriter:
    """Writer that saves metrics as TensorBoard scalars, with the tags of ``tensorboard_tag``.

    TensorBoard's own writer is not used: its thread reports a full disk at the next write, so not if the run closes it
    before, and leaves an incomplete record; and ``named_warnings`` of images requires a process with one thread.

    Args:
        log_dir: folder of the event files.
        start_iter: first iteration. TensorBoard discards existing values from this iteration on. Default 0.
        datasets: names of the test sets. Default (): none.
    """

    def __init__(self, log_dir: str | Path, *, start_iter: int = 0, datasets: Sequence[str] = ()) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._datasets = tuple(dict.fromkeys(datasets))
        self._has_hparams, self._status = False, "finished"
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = _AppendedFile(Path(log_dir) / name)
        self._records = RecordWriter(self._file)
        self._append(file_version="brain.Event:2")
        if start_iter > 0:
            self._append(step=start_iter, session_log=SessionLog(status=SessionLog.START))

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        """Write the finite numbers in ``metrics``, and skip other values."""
        numbers = {
            name: value for name, value in metrics.items() if isinstance(value, (int, float)) and math.isfinite(value)
        }
        values = [
            self._summary.Value(tag=tensorboard_tag(name, self._datasets), simple_value=value)
            for name, value in numbers.items()
        ]
        self._append(step=iteration, summary=self._summary(value=values))

    def write_config(self, text: str, hparams: Mapping[str, bool | int | float | str]) -> None:
        """Write the config for the tabs Text and HParams.

        Args:
            text: config as YAML.
            hparams: values by which TensorBoard compares runs; it adds the last value of each scalar.
        """
        from google.protobuf.struct_pb2 import Value
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo

        code = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown
        value = self._summary.Value(
            tag="config",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[code.encode()]),
        )
        self._append(step=0, summary=self._summary(value=[value]))
        values = {}
        for name, setting in hparams.items():
            if isinstance(setting, bool):
                values[name] = Value(bool_value=setting)
            elif isinstance(setting, int | float):
                values[name] = Value(number_value=setting)
            else:
                values[name] = Value(string_value=str(setting))
        start = SessionStartInfo(start_time_secs=time.time(), hparams=values)
        self._append_hparams("_hparams_/session_start_info", session_start_info=start)
        self._has_hparams = True

    def _append_hparams(self, tag: str, **content: Any) -> None:
        from tensorboard.plugins.hparams.metadata import create_summary_metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        metadata = create_summary_metadata(HParamsPluginData(**content))
        self._append(step=0, summary=self._summary(value=[self._summary.Value(tag=tag, metadata=metadata)]))

    def write_image(self, iteration: int, tag: str, image: "Image") -> None:
        """Write an RGB image."""
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=85)
        content = self._summary.Image(
            height=image.height, width=image.width, colorspace=3, encoded_image_string=buffer.getvalue()
        )
        self._append(step=iteration, summary=self._summary(value=[self._summary.Value(tag=tag, image=content)]))

    def set_status(self, status: str) -> None:
        """Set the status of the run: ``"finished"`` (default), ``"failed"`` or ``"interrupted"``."""
        self._status = status

    def _append(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """Write the status of the run, and close the file. Can be called twice."""
        if self._has_hparams:
            from tensorboard.plugins.hparams.api_pb2 import Status
            from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo

            self._has_hparams = False
            names = {"finished": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
            status = Status.Value(names.get(self._status, "STATUS_UNKNOWN"))
            with suppress(WriteError):  # all metrics have been written
                self._append_hparams(
                    "_hparams_/session_end_info",
                    session_end_info=SessionEndInfo(status=status, end_time_secs=time.time()),
                )
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
