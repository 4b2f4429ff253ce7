"""The hooks of an ordinary run; learning rate, writing and signals are here, the others in files of their own."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine.averaging import EMA, SWA
from fastamp.engine.best import BestMetric, EvalHook
from fastamp.engine.command_line import TrainingInterrupted
from fastamp.engine.freezing import FreezeClassifier, FreezeLayers
from fastamp.engine.monitors import ActivationMonitor
from fastamp.engine.saving import PeriodicCheckpointer
from fastamp.engine.train_loop import HookBase
from fastamp.solver import LearningRateSchedule
from fastamp.utils import comm
from fastamp.utils.env import peak_memory_mb
from fastamp.utils.progress import ProgressBar, format_duration

logger = logging.getLogger(__name__)

__all__ = [
    "EMA",
    "SWA",
    "ActivationMonitor",
    "BestMetric",
    "EvalHook",
    "FreezeClassifier",
    "FreezeLayers",
    "HookBase",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "StopOnSignal",
]


class LRScheduler(HookBase):
    """Set each parameter group's learning rate before each step, but for those that are not ``scheduled``.

    Args:
        schedule: a pure function of the epoch and of the steps taken, so that there is nothing to save.
    """

    def __init__(self, schedule: LearningRateSchedule) -> None:
        self.schedule = schedule

    def before_train(self) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])  # an optimizer that somebody else built

    def before_step(self) -> None:
        trainer = self.trainer
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if not group.get("scheduled", True):
                    continue
                group["lr"] = self.schedule.learning_rate(
                    group["base_lr"], epoch=trainer.epoch, steps_taken=trainer.steps_taken
                )
        trainer.metrics.latest(lr=trainer.optimizers[0].param_groups[0]["lr"])


class PeriodicWriter(HookBase):
    """Write metrics every ``period`` iterations and at the end of the run, and show progress in between.

    Args:
        period: in iterations.
        writers: each has ``write(iteration, metrics)`` and ``close()``.
        images_per_iteration: for the images/s.
        device: for the peak memory.
    """

    def __init__(self, period: int, writers: list[Any], *, images_per_iteration: int, device: torch.device) -> None:
        self.period = period
        self.writers = writers
        self.images_per_iteration = images_per_iteration
        self.device = device

    def before_train(self) -> None:
        self._bar = ProgressBar(self.trainer.max_iter, "training", done=self.trainer.start_iter)
        self._busy = 0.0
        self._written = self.trainer.start_iter

    def after_step(self) -> None:
        trainer = self.trainer
        done = trainer.iter + 1
        self._bar.update(done)
        if done % self.period and done != trainer.max_iter:
            return
        metrics = _mean_losses(trainer.metrics.flush())
        steps = done - trainer.start_iter
        metrics["images_per_second"] = self.images_per_iteration / metrics["time"]
        # Of the steps alone: evaluations come on top.
        self._busy += metrics["time"] * (done - self._written)
        self._written = done
        metrics["eta_seconds"] = self._busy / steps * (trainer.max_iter - done)
        metrics["peak_memory_mb"] = peak_memory_mb(self.device)
        metrics["epoch"] = trainer.epoch
        for writer in self.writers:
            writer.write(trainer.iter, metrics)
        logger.info("%s", console_line(done, trainer.max_iter, metrics))

    def after_train(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the writers and take the progress bar away; safe to call twice."""
        if hasattr(self, "_bar"):
            self._bar.close()
        for writer in self.writers:
            writer.close()


def _mean_losses(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return ``metrics`` with the mean of each loss over all ranks, whose steps are taken or skipped together."""
    names = _losses(metrics)
    sums = comm.sum_over_ranks([metrics[name] for name in names])
    return metrics | {name: total / comm.get_world_size() for name, total in zip(names, sums, strict=True)}


def _losses(metrics: dict[str, Any]) -> list[str]:
    """Return the names of the losses among ``metrics``, in their order."""
    return [name for name in metrics if name == "total_loss" or (name.startswith("loss_") and name != "loss_scale")]


def console_line(done: int, total: int, metrics: dict[str, Any]) -> str:
    """Return the one line that reports a log period."""
    parts = [f"epoch {metrics['epoch']} iter {done}/{total}"]
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


class StopOnSignal(HookBase):
    """After SIGINT, SIGTERM or SIGUSR1, finish the step, save, and end the training; a second signal ends it at once.

    Among several processes the signal of one is everybody's, and the same again within a second is the same one: a
    terminal or a scheduler signals all processes, and the one that started them passes it on as well.

    Args:
        checkpointer: gets ``model_interrupted``.
    """

    saves = True
    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    SAME_WITHIN = 1.0  # seconds

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self.received: int | None = None
        self._received_at = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals inside, and give them back to their former handlers afterwards.

        Outside the main thread, where Python cannot handle signals, they stay with whoever has them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        passed_on = comm.is_distributed() or "TORCHELASTIC_RUN_ID" in os.environ
        if self.received is not None:
            if number == self.received and time.monotonic() - self._received_at < self.SAME_WITHIN:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received, self._received_at = number, time.monotonic()
        for each in () if passed_on else self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        logger.warning(
            "%s: stopping after this step, or after the evaluation that follows it; a second one stops at once",
            signal.Signals(number).name,
        )

    def after_step(self) -> None:
        # At the end of an epoch its evaluation and checkpoint come first, so that the saved state is whole.
        if (self.trainer.iter + 1) % self.trainer.iters_per_epoch:
            self._stop_if_asked()

    def after_epoch(self) -> None:
        if self.trainer.iter + 1 < self.trainer.max_iter:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        number = int(comm.largest(self.received or 0))
        if number:
            path = self.checkpointer.save("model_interrupted")
            comm.synchronize()  # when one process has ended, the others are ended
            raise TrainingInterrupted(number, str(path))
