"""Training step in float32 and in mixed precision."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.amp.policy import dtype_name
from fastamp.amp.step import Clip
from fastamp.config import CfgNode
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine.hooks.precision import DeviceErrors, ParallelChecks, PrecisionHook, PreflightHook
from fastamp.engine.trainer_base import TrainerBase
from fastamp.solver import build_gradient_clipping
from fastamp.utils import comm
from fastamp.utils.registry import Registry

TRAINER_REGISTRY = Registry("SOLVER.TRAINER")


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
        self.data_loader: Any = data_loader  # a ``TrainLoader``, if it is restarted
        self.optimizers = list(optimizers)
        self.policy = policy
        self.accum_steps = accum_steps
        self.on_failure = on_failure
        self.precision_diagnostics = precision_diagnostics or PrecisionDiagnostics()
        self.batches_per_epoch = getattr(data_loader, "iters_per_epoch", None)
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
        self.data_seconds += time.perf_counter() - start
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
        self.step_seconds = time.perf_counter() - self._step_began
        self.metrics.average(data_time=self.data_seconds, time=self.step_seconds)

    def exclude_time(self, seconds: float) -> None:
        """Subtract ``seconds``, e.g. the duration of the pre-flight, from the metric ``time`` of the current step."""
        self._step_began += seconds

    def _start_clock(self) -> None:
        self.data_seconds = 0.0
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
