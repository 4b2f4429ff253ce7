"""Hooks that measure what limits the speed of a run: waiting for images, use of the device's peak, and a profile."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fastamp.amp import PrecisionPolicy
from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.utils import comm
from fastamp.utils.compiled import uncompiled
from fastamp.utils.env import peak_memory_mb
from fastamp.utils.errors import ConfigError, writing

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)

INPUT_BOUND = 0.1
"""Fraction of the time waiting for images above which a run is input-bound."""
_MIN_STEPS = 10
_TOP_OPERATORS = 10
_TRACE = "trace.json.gz"
MAX_PROFILED = 20
"""Maximum number of profiled iterations. One of ResNet-18 takes 35 MiB of memory, and two seconds to be written."""


class SpeedMonitor(HookBase):
    """Log the speed of a stage at its end: images/s, time waiting for images, FLOPs utilization and peak memory.

    If the run waits for images more than ``INPUT_BOUND`` of the time, a warning suggests a fix. The first step of a
    stage is not counted, because it starts the workers of the loader. Nothing is logged for a loop that does not set
    ``step_seconds``. Register this hook before ``PeriodicWriter``.

    If the peak of the device is known, the operations of the second step are counted, and the metric
    ``flops_utilization`` is the fraction of the peak that a step reaches (model FLOPs utilization, Chowdhery et al.
    2022, arXiv:2204.02311, appendix B; with activation checkpointing, also repeated operations are counted).

    Args:
        model: model in training.
        input_fix: function that returns what to change if the run is input-bound.
        peak: function that returns the peak of the device in FLOP/s for the policy of a step, which a fallback
            replaces; None if it is unknown. Default: unknown.
    """

    trainer: "SimpleTrainer"
    every_stage = True

    def __init__(
        self,
        model: nn.Module,
        input_fix: Callable[[], str],
        *,
        peak: Callable[[PrecisionPolicy], float | None] = lambda policy: None,
    ) -> None:
        self.model, self.input_fix, self.peak = model, input_fix, peak

    def before_train(self) -> None:
        self._steps, self._seconds, self._waited, self._flops = 0, 0.0, 0.0, 0
        self._policy: PrecisionPolicy | None = None
        self._seconds_at: defaultdict[float, float] = defaultdict(float)  # peak -> seconds
        self._counting = ExitStack()

    def before_step(self) -> None:
        if self.trainer.policy is not self._policy:
            self._policy = self.trainer.policy
            self._peak = self.peak(self._policy)
        if self._peak and self.trainer.iter == self.trainer.start_iter + 1:
            from torch.utils.flop_counter import FlopCounterMode  # logs a warning without Triton

            self._counting.enter_context(uncompiled(self.model))
            self._counter = self._counting.enter_context(FlopCounterMode(display=False))

    def after_step(self) -> None:
        trainer = self.trainer
        if self._peak and trainer.iter == trainer.start_iter + 1:
            self._counting.close()
            self._flops = self._counter.get_total_flops()
        elif trainer.iter > trainer.start_iter:
            self._steps += 1
            self._seconds += trainer.step_seconds
            self._waited += trainer.data_seconds
            if self._peak and self._flops and trainer.step_seconds:
                self._seconds_at[self._peak] += trainer.step_seconds
                trainer.metrics.average(flops_utilization=self._flops / trainer.step_seconds / self._peak)

    def close(self) -> None:
        self._counting.close()

    def after_train(self) -> None:
        trainer = self.trainer
        if self._steps < _MIN_STEPS or not self._seconds or not comm.is_main_process():
            return
        waiting = self._waited / self._seconds
        batches = trainer.batches_before(trainer.iters_per_epoch) / trainer.iters_per_epoch
        parts = [
            f"{trainer.images_per_batch * batches * self._steps / self._seconds:.0f} images/s",
            f"{100 * waiting:.0f} % of the time waiting for images",
            f"peak memory {peak_memory_mb(next(self.model.parameters()).device):.0f} MiB",
        ]
        if self._seconds_at:
            possible = sum(peak * seconds for peak, seconds in self._seconds_at.items())
            peaks = " and ".join(f"{peak / 1e12:g}" for peak in self._seconds_at)
            parts.append(f"{100 * self._flops * self._steps / possible:.0f} % of the {peaks} TFLOP/s of the device")
        logger.info("%sspeed: %s", f"{trainer.stage_name}: " if trainer.stage_name else "", ", ".join(parts))
        if waiting > INPUT_BOUND:
            logger.warning(
                "input-bound: %.0f %% of the time waiting for images\n  fix: %s", 100 * waiting, self.input_fix()
            )


class Profile(HookBase):
    """Write a trace of PyTorch's profiler and, on CUDA, a snapshot of the allocated memory for some iterations.

    A run that resumes between these iterations profiles the remaining ones; one that resumes after them without their
    trace logs a warning. At most ``MAX_PROFILED`` iterations are profiled; a warning is logged if there are more.

    Args:
        iterations: first and last iteration of the last stage that is profiled, counted from 1.
        folder: folder for ``trace.json.gz`` (for https://ui.perfetto.dev), ``operators.txt`` and, on CUDA,
            ``memory.pickle`` (for https://pytorch.org/memory_viz).

    Raises:
        ConfigError: unless ``iterations`` are two numbers with 1 <= first <= last.
    """

    trainer: "SimpleTrainer"
    priority = Priority.VERY_HIGH

    def __init__(self, iterations: Sequence[int], folder: Path) -> None:
        if len(iterations) != 2 or not 1 <= iterations[0] <= iterations[1]:
            raise ConfigError(
                f"SOLVER.PROFILE: expected the first and the last iteration, counted from 1; got {tuple(iterations)}.\n"
                "  fix: set SOLVER.PROFILE to (first, last), e.g. (101, 105)"
            )
        (self.first, self.last), self.folder = iterations, folder
        if self.last >= self.first + MAX_PROFILED:
            self.last = self.first + MAX_PROFILED - 1
            logger.warning(
                "SOLVER.PROFILE %s has more than %d iterations, whose trace could exceed the memory: iterations %d to "
                "%d are profiled\n  fix: set SOLVER.PROFILE to (%d, %d)",
                *(tuple(iterations), MAX_PROFILED, self.first, self.last, self.first, self.last),
            )
        self._profiler: profile | None = None
        self._running = ExitStack()

    def before_train(self) -> None:
        done = self.trainer.start_iter
        if done >= self.last and comm.is_main_process() and not (self.folder / _TRACE).exists():
            logger.warning(
                "SOLVER.PROFILE: iterations %d to %d are not profiled, because the run resumes after iteration %d\n"
                "  fix: set SOLVER.PROFILE to later iterations",
                *(self.first, self.last, done),
            )

    def before_step(self) -> None:
        iteration = self.trainer.iter + 1
        is_first = iteration == max(self.first, self.trainer.start_iter + 1)
        if not (is_first and iteration <= self.last and comm.is_main_process()):
            return
        activities = [ProfilerActivity.CPU]
        if self.trainer.policy.device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            record = torch.cuda.memory._record_memory_history  # noqa: SLF001 documented by PyTorch
            record(max_entries=1_000_000)
            self._running.callback(record, enabled=None)
        self._profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._profiler.start()
        self._running.callback(self._profiler.stop)

    def after_step(self) -> None:
        if self._profiler is None or self.trainer.iter + 1 < min(self.last, self.trainer.max_iter):
            return
        profiler, self._profiler, sort = self._profiler, None, "self_cpu_time_total"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.trainer.policy.device_type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))  # noqa: SLF001
                sort = "self_device_time_total"
            self._running.close()
            profiler.export_chrome_trace(str(self.folder / _TRACE))
            table = profiler.key_averages().table(sort_by=sort, row_limit=_TOP_OPERATORS)
            (self.folder / "operators.txt").write_text(table, encoding="utf-8")
        first = max(self.first, self.trainer.start_iter + 1)
        logger.info("profile of iterations %d to %d: %s", first, self.trainer.iter + 1, self.folder)

    def close(self) -> None:
        self._profiler = None
        self._running.close()  # a profiler that runs at the end of the process crashes it
