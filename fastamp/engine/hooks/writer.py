"""Hook that writes and logs metrics periodically."""

import logging
import math
from typing import Any

import torch

from fastamp.engine.hooks.base import HookBase
from fastamp.utils import comm
from fastamp.utils.env import peak_memory_mb
from fastamp.utils.progress import ProgressBar, format_duration

logger = logging.getLogger(__name__)


class PeriodicWriter(HookBase):
    """Write and log metrics every ``period`` iterations and at the end of a stage, and show a progress bar.

    Writers receive iterations and epochs from the start of the run; the log and the time left are those of the stage.

    Args:
        period: log period in iterations.
        writers: objects with ``write(iteration, metrics)`` and ``close()``.
        device: device of the model, whose peak memory use is logged.
    """

    every_stage = True

    def __init__(self, period: int, writers: list[Any], *, device: torch.device) -> None:
        self.period = period
        self.writers = writers
        self.device = device

    def before_train(self) -> None:
        trainer = self.trainer
        self._bar = ProgressBar(trainer.max_iter, trainer.stage_name or "training", done=trainer.start_iter)
        self._busy = 0.0
        self._written = trainer.start_iter

    def after_step(self) -> None:
        trainer = self.trainer
        done = trainer.iter + 1
        self._bar.update(done)
        if done % self.period and done != trainer.max_iter:
            return
        metrics = _mean_losses(trainer.metrics.flush())
        steps = done - trainer.start_iter
        batches_per_iteration = trainer.batches_before(trainer.iters_per_epoch) / trainer.iters_per_epoch
        metrics["images_per_second"] = trainer.images_per_batch * batches_per_iteration / metrics["time"]
        # Training steps only, without evaluations.
        self._busy += metrics["time"] * (done - self._written)
        self._written = done
        metrics["eta_seconds"] = self._busy / steps * (trainer.max_iter - done)
        metrics["peak_memory_mb"] = peak_memory_mb(self.device)
        self._bar.note_line()
        line = console_line(done, trainer.max_iter, metrics | {"epoch": trainer.epoch}, epochs=trainer.max_epoch)
        logger.info("%s%s", f"{trainer.stage_name}: " if trainer.stage_name else "", line)
        metrics["epoch"] = trainer.epochs_before + trainer.epoch  # from 0; so is the iteration
        for writer in self.writers:
            writer.write(trainer.iters_before + trainer.iter, metrics)

    def after_train(self) -> None:
        self._bar.close()


def _mean_losses(metrics: dict[str, Any]) -> dict[str, Any]:
    """Average each loss over all ranks. The ranks have values for the same losses, because they skip the same steps."""
    names = _losses(metrics)
    sums = comm.sum_over_ranks([metrics[name] for name in names])
    return metrics | {name: total / comm.get_world_size() for name, total in zip(names, sums, strict=True)}


def _losses(metrics: dict[str, Any]) -> list[str]:
    """List the names of the losses in ``metrics``."""
    return [name for name in metrics if name == "total_loss" or (name.startswith("loss_") and name != "loss_scale")]


def console_line(done: int, total: int, metrics: dict[str, Any], *, epochs: int | None = None) -> str:
    """Format the metrics of a log period as one line, with epochs and iterations counted from 1.

    Args:
        done: number of completed iterations.
        total: number of iterations of the run.
        metrics: metrics as written to ``metrics.json``, whose ``epoch`` counts from 0.
        epochs: number of epochs of the run. Default: not shown.
    """
    of_epochs = "" if epochs is None else f"/{epochs}"
    parts = [f"epoch {metrics['epoch'] + 1}{of_epochs} iter {done}/{total}"]
    parts += [f"{name} {metrics[name]:.4g}" for name in _losses(metrics)]
    if "grad_norm" in metrics:
        parts.append(f"grad_norm {metrics['grad_norm']:.3g}")
    if "clip_coefficient" in metrics:
        parts.append(f"clip {metrics['clip_coefficient']:.2f}")
    parts.append(f"scale {metrics['loss_scale']:g}")
    if "zero_gradients" in metrics:
        parts.append(f"zero gradients {100 * metrics['zero_gradients']:.3g} %")
    if "largest_activation" in metrics:
        share = f"{100 * metrics['activation_limit_share']:.2g} % of the limit"
        parts.append(f"activation {metrics['largest_activation']:.3g} ({share}, {metrics['largest_activation_layer']})")
    skipped = f"skipped {metrics['skipped_total']}"
    parts.append(f"{skipped} ({metrics['skipped_in_a_row']} in a row)" if metrics["skipped_in_a_row"] else skipped)
    parts.append(f"lr {metrics['lr']:.2e}")
    parts.append(f"{metrics['images_per_second']:.0f} images/s (data {metrics['data_time']:.3f} s)")
    parts.append(f"mem {metrics['peak_memory_mb']:.0f} MiB")
    if math.isfinite(metrics["eta_seconds"]):
        parts.append(f"eta {format_duration(metrics['eta_seconds'])}")
    return "  ".join(parts)
