"""Dry run: run two iterations and a small evaluation, and estimate the time, memory and disk space of the run."""

import logging
import os
import shutil
import time
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fastamp.checkpoint.weights_file import checkpoint_size
from fastamp.config import CfgNode
from fastamp.data.dataset import ReidDataset
from fastamp.data.loader import TestLoader
from fastamp.data.samplers import InferenceSampler
from fastamp.diagnostics import environment_queries
from fastamp.engine import hooks
from fastamp.engine.defaults import DefaultTrainer
from fastamp.engine.hooks.base import HookBase
from fastamp.engine.hooks.freeze import freeze_length
from fastamp.engine.setup import default_setup
from fastamp.engine.stages import Stage
from fastamp.engine.train_loop import SimpleTrainer
from fastamp.engine.unreached import find_unreached_events
from fastamp.evaluation import Protocol
from fastamp.utils import comm
from fastamp.utils.compiled import uncompiled
from fastamp.utils.env import peak_memory_mb
from fastamp.utils.errors import ConfigError, NoMatchError
from fastamp.utils.progress import format_duration

logger = logging.getLogger(__name__)

NUM_ITERATIONS = 2
"""Number of training iterations, and of test batches per process. The first is a warm-up, the last is measured."""


def dry_run(cfg: CfgNode, folder: str, *, resume: bool = False) -> None:
    """Run two iterations and a small evaluation with ``cfg``, and print the estimated time, memory and disk space.

    Args:
        cfg: config of the run. No files are written to its ``OUTPUT_DIR``.
        folder: temporary folder for output files.
        resume: whether to start from the newest checkpoint in ``OUTPUT_DIR``. Default False.

    Raises:
        UserError: if the run fails in its first two iterations or in the evaluation.
    """
    output_dir = Path(cfg.OUTPUT_DIR)
    overrides = {"TEST.PRECISE_BN.NUM_ITER": NUM_ITERATIONS} if cfg.TEST.PRECISE_BN.ENABLED else {}
    cfg = cfg.with_values({"OUTPUT_DIR": folder, **overrides})
    default_setup(cfg)
    free = _free_bytes(output_dir)
    trainer = _DryRunTrainer(cfg)
    trainer.resume_or_load(resume=resume, folder=output_dir)
    trainer.trainer.precision_diagnostics.disable_crash_dumps()  # crash dumps in a temporary folder are useless
    rows = _describe_model(trainer)
    if events := find_unreached_events(cfg, trainer.trainer.iters_per_epoch):
        rows.append(["not reached", "; ".join(events)])
    stages = [stage for stage in trainer.stages.left() if stage.trainer.start_iter < stage.trainer.max_iter]
    loops = [stage.trainer for stage in stages]
    seconds = [_train(trainer, stage) for stage in stages]
    for loop, measured in zip(loops, seconds, strict=True):
        rows.append([loop.stage_name or "training", _describe_training(trainer, loop, measured)])
    columns = Protocol.from_config(cfg).columns
    loaders = {
        name: (_TimedLoader(_subset_loader(*test_loader, columns)), *test_loader)
        for name, test_loader in trainer.test_loaders.items()
    }
    rows += _evaluate(trainer, loaders)
    rows.append(["memory", _describe_memory(next(trainer.model.parameters()).device)])
    if loops:
        evaluation = sum(len(full.dataset) / subset.images_per_second for subset, full, _ in loaders.values())
        left = [loop.max_iter - loop.start_iter for loop in loops]
        training = sum(count * measured[-1] for count, measured in zip(left, seconds, strict=True))
        rows.append(["total", _describe_duration(trainer, sum(left), training, evaluation)])
        rows.append(["checkpoints", _describe_checkpoints(trainer, loops, free)])
    else:
        rows.append(["total", "the training is complete; increase SOLVER.MAX_EPOCH to continue training"])
    if comm.is_main_process():
        table = tabulate(rows, ["dry run", ""], tablefmt="github")
        print(f"\n{table}\n\ndry run: nothing was written to {output_dir}", flush=True)


@typing.runtime_checkable
class CountedModule(typing.Protocol):
    """Module whose multiply-adds do not depend on the operations that compute it, such as a recurrence."""

    def multiply_adds(self, *inputs: Any) -> float:
        """Count the multiply-adds of ``forward`` with these positional arguments."""


def multiply_adds(model: nn.Module, inputs: Any) -> float:
    """Count the multiply-adds of convolutions and matrix products in ``model(inputs)``.

    A ``CountedModule`` counts its own.
    """
    counter = FlopCounterMode(display=False)
    counts: list[float] = []

    def subtract_before(module: nn.Module, args: Any) -> None:
        counts.append(counter.get_total_flops() / 2)

    def subtract_after(module: Any, args: Any, output: Any) -> None:
        counts.append(module.multiply_adds(*args) - counter.get_total_flops() / 2)

    # The counter does not support fused attention.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, ExitStack() as hooks_of_modules:
        for module in model.modules():
            if isinstance(module, CountedModule):
                hooks_of_modules.enter_context(module.register_forward_pre_hook(subtract_before))
                hooks_of_modules.enter_context(module.register_forward_hook(subtract_after))
        model(inputs)
    return counter.get_total_flops() / 2 + sum(counts)


# ---- training


class _DryRunTrainer(DefaultTrainer):
    """Trainer without the hooks that write files or stop the run."""

    EXCLUDED = (
        *(hooks.EvalHook, hooks.PeriodicCheckpointer, hooks.PeriodicWriter, hooks.Profile, hooks.SpeedMonitor),
        hooks.StopOnSignal,
    )

    def build_hooks(self) -> list[HookBase]:
        return [hook for hook in super().build_hooks() if not isinstance(hook, self.EXCLUDED)]


class _StopDryRun(Exception):
    """Raised to end the training loop after ``NUM_ITERATIONS``."""


class _Stopwatch(HookBase):
    """Measure the time of each iteration and end the loop after ``NUM_ITERATIONS``. Register this hook last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    def before_step(self) -> None:
        self._start = self._now()

    def after_step(self) -> None:
        self.seconds.append(self._now() - self._start)
        if len(self.seconds) == NUM_ITERATIONS:
            raise _StopDryRun

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _train(trainer: DefaultTrainer, stage: Stage) -> list[float]:
    """Run up to ``NUM_ITERATIONS`` iterations of a stage and return the duration of each in seconds."""
    stopwatch = _Stopwatch(next(trainer.model.parameters()).device)
    stage.trainer.register_hooks([stopwatch])
    with suppress(_StopDryRun):
        trainer.stages.train(stage)
    return stopwatch.seconds


# ---- evaluation


class _TimedLoader:
    """Test loader that records when each batch has been processed.

    Attributes:
        images: number of images in each batch.
        times: times in seconds: when the iteration over the loader started, and when each batch had been processed.
    """

    def __init__(self, loader: TestLoader) -> None:
        self.loader = loader
        self.images: list[int] = []
        self.times: list[float] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.images, self.times = [], [time.perf_counter()]
        for batch in self.loader:
            yield batch
            self.images.append(len(batch["images"]))
            self.times.append(time.perf_counter())  # the evaluator has copied the features to the CPU

    @property
    def images_per_second(self) -> float:
        """Images per second in the last batch of this process, multiplied by the number of processes."""
        return comm.get_world_size() * self.images[-1] / (self.times[-1] - self.times[-2])


def _subset_loader(loader: TestLoader, num_query: int, columns: Iterable[str] = ()) -> TestLoader:
    """Build a test loader with at most ``NUM_ITERATIONS`` batches per process.

    The batches contain query images, then gallery images of their identities, then gallery images of other identities.
    The queries have as many different values of ``columns`` as possible, e.g. some are for validation.
    """
    dataset, size = loader.dataset, loader.batch_sampler.batch_size
    count = min(len(dataset), NUM_ITERATIONS * size * comm.get_world_size())
    queries = _in_turn(dataset, num_query, columns)
    if count < len(dataset):
        queries = sorted(queries[: max(1, count // 4)])
    query_identities = {dataset.labels[index] for index in queries}
    gallery = sorted(range(num_query, len(dataset)), key=lambda index: dataset.labels[index] not in query_identities)
    chosen = [*queries, *gallery[: count - len(queries)]]
    rank, world_size = comm.get_rank(), comm.get_world_size()
    sampler = InferenceSampler(size=len(chosen), batch_size=size, rank=rank, world_size=world_size, images=chosen)
    return TestLoader(dataset, sampler, num_workers=loader.num_workers, device=loader.device)


def _in_turn(dataset: Any, num_query: int, columns: Iterable[str]) -> list[int]:
    """Order the queries so that those with each combination of values of ``columns`` take turns."""
    encoded = dataset.columns if isinstance(dataset, ReidDataset) else {}
    values = [encoded[name].values for name in columns if name in encoded]
    turns: Counter[tuple[Any, ...]] = Counter()
    order = []
    for query in range(num_query):
        key = tuple(str(column[query]) for column in values)
        order.append((turns[key], query))
        turns[key] += 1
    return [query for _, query in sorted(order)]


def _evaluate(trainer: DefaultTrainer, loaders: dict[str, tuple[_TimedLoader, TestLoader, int]]) -> list[list[str]]:
    """Evaluate on subsets of the test sets and return one row per test set."""
    rows = []
    logger.info("evaluating on a subset of each test set: the metrics are not meaningful")
    with trainer.evaluated_weights():
        for name, (subset, full, num_query) in loaders.items():
            indices = set(comm.gather_rows(torch.tensor(subset.loader.batch_sampler.indices)).tolist())
            queries = sum(index < num_query for index in indices)
            text = f"{len(indices)} of {len(full.dataset)} images, {queries} of {num_query} queries"
            try:
                trainer.evaluate({name: (subset, queries)})
            except NoMatchError:
                text += "; no query has a match among them, so ranking was not tested"
            warm = "last batch" if len(subset) > 1 else "including warm-up"
            rows.append([f"evaluation on {name}", f"{text}; {subset.images_per_second:.0f} images/s ({warm})"])
    return rows


# ---- the report


def _describe_model(trainer: DefaultTrainer) -> list[list[str]]:
    parameters = list(trainer.model.parameters())
    total, trainable = (sum(p.numel() for p in parameters if p.requires_grad or kind == "all") for kind in ("all", ""))
    loader, _ = next(iter(trainer.test_loaders.values()))
    batch = loader.dataset.__getitems__([(0, 0, 0)])
    batch["images"] = batch["images"].to(next(trainer.model.parameters()).device)
    trainer.model.eval()  # the training loop switches back to training mode
    with uncompiled(trainer.model):
        work = multiply_adds(trainer.model, batch)
    return [
        ["precision", trainer.policy.describe()],
        ["parameters", f"{total:,}, of which {trainable:,} trainable"],
        ["multiply-adds", f"{work / 1e9:.3g} G per image, in evaluation"],
    ]


def _describe_training(trainer: DefaultTrainer, loop: SimpleTrainer, seconds: list[float]) -> str:
    cfg, end = trainer.cfg, loop.start_iter + len(seconds)
    images = loop.images_per_batch * (loop.batches_before(end) - loop.batches_before(end - 1))
    text = f"{images / seconds[-1]:.0f} images/s: {seconds[-1]:.3f} s for the measured iteration"
    if len(seconds) > 1:
        text += f"; {seconds[0]:.3f} s for the warm-up iteration"
    frozen = freeze_length(cfg, loop.iters_per_epoch) if cfg.MODEL.FREEZE_LAYERS and loop.is_last_stage else 0
    if end <= frozen < loop.max_iter:
        text += "; iterations take longer once MODEL.FREEZE_LAYERS is no longer frozen"
    return text


def _describe_memory(device: torch.device) -> str:
    where = str(device) if device.type == "cuda" else "system memory"
    _, total = environment_queries.memory(device)
    of_total = f", of {total / 2**30:.1f} GiB of {where}" if total else ""
    scope = " per process" if comm.get_world_size() > 1 else ""
    return f"peak of {peak_memory_mb(device):.0f} MiB{scope}{of_total}"


def _describe_duration(trainer: DefaultTrainer, iterations: int, training: float, evaluation: float) -> str:
    cfg = trainer.cfg
    period, last = cfg.TEST.EVAL_PERIOD, cfg.SOLVER.MAX_EPOCH
    count = sum(epoch % period == 0 or epoch == last for epoch in _epochs_left(trainer.trainer))
    count += cfg.TEST.EVAL_START and trainer.trainer.start_iter == 0
    without = ["ranking", *(["precise batch norm"] if cfg.TEST.PRECISE_BN.ENABLED else []), "saving"]
    return (
        f"{format_duration(training + count * evaluation)}: {iterations} iterations {format_duration(training)}, "
        f"{count} evaluations {format_duration(count * evaluation)} (excluding {', '.join(without)})"
    )


def _describe_checkpoints(trainer: DefaultTrainer, loops: list[SimpleTrainer], free: int) -> str:
    size = checkpoint_size(trainer.checkpointer.content())
    period = trainer.cfg.SOLVER.CHECKPOINT_PERIOD
    due = [epoch for loop in loops for epoch in _epochs_left(loop) if epoch % period == 0]
    periodic = len(due) - (loops[-1].max_epoch % period == 0)  # the last one is model_final
    need = size * (periodic + 2)
    short = "" if need <= free else "; not enough disk space"
    return (
        f"{need / 2**20:.0f} MiB: {periodic} by SOLVER.CHECKPOINT_PERIOD, the best and the last, "
        f"{size / 2**20:.1f} MiB each; {free / 2**30:.1f} GiB free{short}"
    )


def _epochs_left(loop: SimpleTrainer) -> range:
    """Return the numbers of the epochs that have not been completed. The first epoch has number 1."""
    return range(loop.start_iter // loop.iters_per_epoch + 1, loop.max_epoch + 1)


def _free_bytes(output_dir: Path) -> int:
    """Return the number of free bytes on the file system of ``output_dir``. The folder itself need not exist.

    Raises:
        ConfigError: if ``output_dir`` is not writable.
    """
    absolute = output_dir.expanduser().absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"OUTPUT_DIR {str(output_dir)!r} is not writable.\n  fix: choose another OUTPUT_DIR")
    return shutil.disk_usage(existing).free
