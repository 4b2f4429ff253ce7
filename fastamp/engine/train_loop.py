"""Training loop and training step."""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.amp.policy import dtype_name
from fastamp.amp.step import Clip
from fastamp.config import CfgNode
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine.hooks.base import HookBase
from fastamp.engine.hooks.precision import DeviceErrors, ParallelChecks, PrecisionHook, PreflightHook
from fastamp.report import ClusterSheets
from fastamp.solver import build_gradient_clipping
from fastamp.utils import comm
from fastamp.utils.events import MetricStore
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

TRAINER_REGISTRY = Registry("SOLVER.TRAINER")


class TrainerBase:
    """Training loop over epochs and iterations that calls hooks. Subclasses implement ``run_step``.

    Attributes:
        iter: current iteration, from 0.
        epoch: current epoch, from 0.
        start_iter: first iteration to run; above 0 after a resume.
        max_iter: total number of iterations.
        iters_per_epoch: number of iterations in an epoch.
        labels_checksum: CRC32 of the training labels, verified on resume; None disables the check.
        processes: number of training processes.
        metrics: metrics of the current log period.
        rank_maxima: numbers that hooks such as ``StopOnSignal`` register. Their maxima over all ranks are computed in
            the all-reduce of the verdict.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self._in_step = False
        self.iter = self.start_iter = self.max_iter = 0
        self.epoch = self.max_epoch = 0
        self.iters_per_epoch = 1
        self.labels_checksum: int | None = None
        self.processes = comm.get_world_size()
        self.metrics = MetricStore()
        self.rank_maxima = comm.RankMaxima()

    def register_hooks(self, hooks: Iterable[HookBase]) -> None:
        """Add hooks. They are called by ``priority``, and hooks of the same priority in the order of registration."""
        added = list(hooks)
        for hook in added:
            hook.trainer = self
        self._hooks = sorted([*self._hooks, *added], key=lambda hook: hook.priority)

    def set_data(self, iters_per_epoch: int, labels_checksum: int | None = None) -> None:
        """Set the number of iterations per epoch and the checksum of the training labels, both verified on resume."""
        self.iters_per_epoch, self.labels_checksum = iters_per_epoch, labels_checksum

    def move_to(self, iteration: int, max_epoch: int) -> None:
        """Set ``iter`` and ``epoch`` for ``iteration``, and ``max_iter`` to the length of ``max_epoch`` epochs."""
        self.max_epoch, self.max_iter = max_epoch, max_epoch * self.iters_per_epoch
        self.iter, self.epoch = iteration, iteration // self.iters_per_epoch

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run iterations ``start_iter`` to ``max_epoch * iters_per_epoch - 1``."""
        self.start_iter, self.iters_per_epoch = start_iter, iters_per_epoch
        self.move_to(start_iter, max_epoch)
        self.call_hooks("before_train")
        for iteration in range(start_iter, self.max_iter):
            self.move_to(iteration, max_epoch)
            if self.iter == start_iter or self.iter % iters_per_epoch == 0:
                if self.prepare_epoch():
                    self.restart_loader()
                self.call_hooks("before_epoch")
            self.rank_maxima.discard()  # run_step may be overridden and compute no verdict
            with self.step_context():
                self.run_step()
            if (self.iter + 1) % iters_per_epoch == 0:
                self.call_hooks("after_epoch")
        self.call_hooks("after_train")

    def prepare_epoch(self) -> bool:
        """Prepare the data of the current epoch, e.g. pseudo labels; called before ``before_epoch`` of the hooks.

        It is called again for an epoch in which the run was resumed.

        Returns:
            True if the batches of the epoch differ from those that workers may have loaded in advance: the loader is
            then started again, at the batch of the current iteration. Default False.
        """
        return False

    def restart_loader(self) -> None:
        """Start the loader again at the batch of the current iteration. This class has no loader."""

    def run_step(self) -> None:
        """Run one iteration."""
        raise NotImplementedError

    def cluster_sheets(self) -> ClusterSheets | None:
        """Return the clusters of the training images for the report. Default: None, a training with labels."""
        return None

    def batches_before(self, iteration: int) -> int:
        """Return the number of batches consumed before ``iteration``. This class uses one batch per iteration."""
        return iteration

    def call_hooks(self, moment: str, *args: Any) -> None:
        """Call the method named ``moment``, e.g. ``"after_step"``, of every hook."""
        for hook in self._hooks:
            getattr(hook, moment)(*args)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Return a context manager for one step, which calls ``before_step``, and ``after_step`` or ``on_step_error``.

        A context nested in another one has no effect. Both ``train`` and ``run_step`` enter the context, because a
        subclass may override either of them.
        """
        if self._in_step:
            yield
            return
        self.call_hooks("before_step")
        self._in_step = True
        try:
            yield
        except Exception as error:
            self._notify_error(error)
            raise
        finally:
            self._in_step = False
        self.call_hooks("after_step")

    def _notify_error(self, error: Exception) -> None:
        """Call ``on_step_error`` of every hook, then raise the first error that a hook raised, if any."""
        first = None
        for hook in self._hooks:
            try:
                hook.on_step_error(error)
            except Exception as other:
                if first is not None:
                    logger.warning("%s.on_step_error also raised an error: %s", type(hook).__name__, other)
                first = first or other
        if first is not None:
            raise first

    def state_dict(self) -> dict[str, Any]:
        """Return the next iteration, the states of the hooks, and the values that are verified on resume."""
        return {
            "iteration": self.iter + 1,
            "iters_per_epoch": self.iters_per_epoch,
            "processes": self.processes,
            "labels_checksum": self.labels_checksum,
            "hooks": {name: state for name, hook in self._hooks_by_name() if (state := hook.state_dict())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, a return value of ``state_dict``. All hooks must already be registered.

        Raises:
            ValueError: if the number of iterations per epoch or the training labels have changed.
        """
        if state["iters_per_epoch"] != self.iters_per_epoch:
            raise ValueError(
                f"the number of iterations per epoch changed from {state['iters_per_epoch']} to "
                f"{self.iters_per_epoch}: SOLVER.IMS_PER_BATCH, SOLVER.ACCUM_STEPS or the training data changed"
            )
        before = state["labels_checksum"]
        if before is not None and self.labels_checksum is not None and before != self.labels_checksum:
            raise ValueError(
                "the labels of the training images differ from those in the checkpoint: DATASETS or the training data "
                "changed"
            )
        processes = state["processes"]
        if processes != self.processes:
            logger.warning(
                "the number of processes changed from %d to %d: the batches are the same, but dropout, batch norm and "
                "losses that are computed per process give different results.\n"
                "  fix: for the same results, resume with the earlier number of processes",
                processes,
                self.processes,
            )
        self.start_iter = state["iteration"]
        for name, hook in self._hooks_by_name():
            if name in state["hooks"]:
                hook.load_state_dict(state["hooks"][name])

    def _hooks_by_name(self) -> Iterator[tuple[str, HookBase]]:
        counts: dict[str, Iterator[int]] = {}
        for hook in self._hooks:
            name = type(hook).__name__
            number = next(counts.setdefault(name, itertools.count()))
            yield (name if number == 0 else f"{name}.{number}"), hook


@TRAINER_REGISTRY.register()
class SimpleTrainer(TrainerBase):
    """Trainer with one optimizer step per iteration, in float32.

    ``AMPTrainer`` runs the same step under another precision policy. With several processes, DistributedDataParallel
    averages the gradients and broadcasts the batch-norm statistics of rank 0.

    Args:
        model: in training mode, maps a batch to a dict of loss name -> scalar tensor.
        data_loader: infinite iterable of batches. Its optional attribute ``iters_per_epoch`` is the number of batches
            in an epoch. With this attribute, the last step of an epoch uses the remaining batches. Without it, every
            step uses ``accum_steps`` batches.
        optimizers: optimizers of the model. In each iteration, either all optimizers update their parameters, or none
            does.
        policy: precision of the forward pass.
        accum_steps: number of batches whose gradients are averaged for one step. Default 1.
        on_failure: ``SOLVER.AMP.ON_FAILURE``: reaction to too many skipped steps. ``"bfloat16"`` or ``"float32"``
            continues in this dtype, at most once per run; ``"error"`` (default) raises ``PrecisionFailure``.
        precision_diagnostics: runs the pre-flight check and writes crash dumps. None (default) disables both.
        scaler, clip, max_consecutive_skips, guard_buffers: see ``OptimizationStep``.

    Attributes:
        on_failure, precision_diagnostics: see Args. A newly assigned value takes effect at the next step.
        losses: detached losses of the last batch, with their sum ``total_loss``.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[dict[str, Any]],
        optimizers: Sequence[Optimizer],
        *,
        policy: PrecisionPolicy,
        accum_steps: int = 1,
        on_failure: str = "error",
        precision_diagnostics: PrecisionDiagnostics | None = None,
        scaler: LossScaler | None = None,
        clip: Clip | None = None,
        max_consecutive_skips: int = 25,
        guard_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.data_loader = data_loader
        self.optimizers = list(optimizers)
        self.policy = policy
        self.accum_steps = accum_steps
        self.on_failure = on_failure
        self.precision_diagnostics = precision_diagnostics or PrecisionDiagnostics()
        self.batches_per_epoch: int | None = getattr(data_loader, "iters_per_epoch", None)
        self.steps_taken = 0
        self.losses: dict[str, torch.Tensor] = {}
        self.step = OptimizationStep(
            model,
            self.optimizers,
            scaler=scaler,
            clip=clip,
            max_consecutive_skips=max_consecutive_skips,
            guard_buffers=guard_buffers,
            rank_maxima=self.rank_maxima,
        )
        self.register_hooks([PrecisionHook(), ParallelChecks(), DeviceErrors(), PreflightHook()])
        self._first_dtype = policy.dtype
        self._autocast_checked = False
        self._parallel_model: nn.Module | None = None
        self._trainable: list[int] = []
        self._batches: Iterator[dict[str, Any]] | None = None
        self._start_clock()

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, model: nn.Module, data_loader: Iterable[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> "SimpleTrainer":
        """Build the trainer from a config, on the device of the model's parameters."""
        policy = cls.build_policy(cfg, next(model.parameters()).device)
        trainer = cls(
            model,
            data_loader,
            optimizers,
            policy=policy,
            accum_steps=cfg.SOLVER.ACCUM_STEPS,
            on_failure=cfg.SOLVER.AMP.ON_FAILURE,
            precision_diagnostics=PrecisionDiagnostics.from_config(cfg),
            scaler=LossScaler.from_config(cfg, policy),
            clip=build_gradient_clipping(cfg),
            max_consecutive_skips=cfg.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
            guard_buffers=cfg.SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP,
        )
        trainer.step.set_monitor_period(cfg.LOG_PERIOD)
        return trainer

    @classmethod
    def build_policy(cls, cfg: CfgNode, device: torch.device) -> PrecisionPolicy:
        """Build the precision policy of the trainer: float32 on ``device``."""
        return PrecisionPolicy.float32(cfg, device)

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run the training loop with the model in training mode."""
        self.model.train()
        self._autocast_checked = False
        try:
            super().train(start_iter, max_epoch, iters_per_epoch)
        finally:
            self._batches = self._parallel_model = None  # stops the workers of the loader
            self._trainable = []

    def batches_before(self, iteration: int) -> int:
        """Return the number of batches consumed before ``iteration``.

        An iteration uses ``accum_steps`` batches; the last iteration of an epoch uses the remaining batches.
        """
        if self.batches_per_epoch is None:
            return iteration * self.accum_steps
        epochs, within = divmod(iteration, -(-self.batches_per_epoch // self.accum_steps))
        return epochs * self.batches_per_epoch + min(within * self.accum_steps, self.batches_per_epoch)

    def run_step(self) -> None:
        """Run the forward and backward passes of one step, and update the parameters.

        The update is skipped if a loss or a gradient is not finite on any rank.

        Raises:
            PrecisionFailure: if too many steps were skipped; see ``OptimizationStep.check_skips``.
        """
        with self.step_context():  # its hooks explain errors, and raise after too many skipped steps
            self._start_clock()
            model, step, history = self.parallel_model(), self.step, []
            count = self.batches_before(self.iter + 1) - self.batches_before(self.iter)
            step.zero_grad()  # also copies the buffers that the forward pass modifies
            for number in range(count):
                batch = self.next_batch()
                self.call_hooks("before_forward", batch)
                with nullcontext() if number == count - 1 else comm.no_sync(model):  # DDP averages in the last backward
                    with self.autocast():
                        losses = model(batch)
                    step.scale(losses, weight=1 / count).backward()
                history.append({"total_loss": step.total_loss} | {name: loss.detach() for name, loss in losses.items()})
            self.call_hooks("after_backward")
            gradients = step.unscale()
            verdict = step.check_finite(gradients)  # across ranks; the only host-device synchronization
            if verdict.ok:
                step.clip_gradients(gradients)
                step.apply(gradients)
                self.steps_taken += 1
            else:
                step.skip()  # restores the buffers
            step.update_scale(verdict.ok)
            self.record_metrics(history)

    def next_batch(self) -> dict[str, Any]:
        """Return the next batch of the loader."""
        start = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self.data_loader)
        batch = next(self._batches)
        self._data_seconds += time.perf_counter() - start
        return batch

    def restart_loader(self) -> None:
        """Start the loader again at the batch of the current iteration, without batches loaded in advance."""
        self._batches = None
        self.data_loader.start_at(self.batches_before(self.iter))

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of the policy.

        The context of the first forward pass also checks that the model computes in low precision.
        """
        if self._autocast_checked:
            return self.policy.autocast()
        self._autocast_checked = True
        return self.policy.checked_autocast(self.model)

    def parallel_model(self) -> nn.Module:
        """Return the model wrapped in DDP if there are several processes, else the model itself.

        DDP expects a gradient for each parameter that was trainable when the wrapper was created. The wrapper is
        therefore recreated when the set of trainable parameters changes.
        """
        if not comm.is_distributed():
            return self.model
        self.step.tensors.refresh()
        trainable = [id(p) for p in self.step.tensors.parameters if p.requires_grad]
        if self._parallel_model is None or trainable != self._trainable:
            self._parallel_model, self._trainable = self.wrap_parallel(self.model), trainable
        return self._parallel_model

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        """Wrap ``model`` in DDP. Override to register a communication hook."""
        return comm.data_parallel(model)

    def set_policy(self, policy: PrecisionPolicy) -> None:
        """Switch to another precision policy and disable loss scaling. No effect if the policy is already in use."""
        if policy is not self.policy:
            self.policy = policy
            self.step.disable_loss_scaling()

    def record_metrics(self, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        """Add the values of the current step to ``metrics``.

        Args:
            losses: one dict per batch of the step: loss name -> detached loss. ``total_loss`` is the sum of the losses.
        """
        step, verdict = self.step, self.step.verdict
        self.losses = losses[-1]
        if verdict.ok:
            # Skipped steps are excluded from averages: one infinite norm would make the average infinite.
            for batch_losses in losses:
                self.metrics.average(**batch_losses)
            self.metrics.average(grad_norm=verdict.grad_norm)
            if verdict.clip_coefficient is not None:
                self.metrics.average(clip_coefficient=verdict.clip_coefficient)
            if verdict.zero_fraction is not None:
                self.metrics.average(zero_gradients=verdict.zero_fraction)
        self.metrics.average(skip_ratio=float(not verdict.ok))
        self.metrics.latest(
            loss_scale=verdict.loss_scale, skipped_total=step.skipped_total, skipped_in_a_row=step.skipped_in_a_row
        )
        self.metrics.average(data_time=self._data_seconds, time=time.perf_counter() - self._step_began)

    def exclude_time(self, seconds: float) -> None:
        """Subtract ``seconds``, e.g. the duration of the pre-flight, from the metric ``time`` of the current step."""
        self._step_began += seconds

    def _start_clock(self) -> None:
        self._data_seconds = 0.0
        self._step_began = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop and of ``OptimizationStep``, ``steps_taken``, and the fallback dtype, if any."""
        fallback = None
        if self.policy.dtype != self._first_dtype:
            fallback = {"from": dtype_name(self._first_dtype), "to": dtype_name(self.policy.dtype)}
        loop_state = {"steps_taken": self.steps_taken, "step": self.step.state_dict(), "fallback": fallback}
        return super().state_dict() | loop_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned; continue in the fallback dtype if the run had fallen back."""
        super().load_state_dict(state)
        self.steps_taken = state["steps_taken"]
        self.step.load_state_dict(state["step"])
        fallback = state["fallback"]
        if fallback and fallback["from"] == dtype_name(self.policy.dtype):
            policy = self.policy.fall_back(fallback["to"], f"fell back from {fallback['from']} before the resume")
            if policy is not None:
                self.set_policy(policy)


@TRAINER_REGISTRY.register()
class AMPTrainer(SimpleTrainer):
    """Trainer in mixed precision: bfloat16, or float16 with loss scaling.

    If ``SOLVER.AMP.DTYPE`` is auto and the device has no native low-precision dtype, the trainer uses float32.
    """

    @classmethod
    def build_policy(cls, cfg: CfgNode, device: torch.device) -> PrecisionPolicy:
        """Build the precision policy from ``SOLVER.AMP``."""
        return PrecisionPolicy.from_config(cfg, device)
