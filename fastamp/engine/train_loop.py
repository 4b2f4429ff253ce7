"""The training loop, its hooks, and the one training step."""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp import LossScaler, OptimizationStep, PrecisionFailure, PrecisionPolicy, StepVerdict
from fastamp.amp.health import check_communication
from fastamp.amp.policy import dtype_name
from fastamp.amp.refusal import IN_TRAINING, Refusals
from fastamp.amp.step import Clip
from fastamp.diagnostics.precautions import Precautions
from fastamp.engine.hooks.base import HookBase
from fastamp.solver import build_gradient_clipping
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.events import MetricStore
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

TRAINER_REGISTRY = Registry("SOLVER.TRAINER")


class TrainerBase:
    """The loop: epochs, iterations and hooks, without a notion of what a step does.

    Attributes:
        iter: the current iteration, from 0.
        epoch: the current epoch, from 0.
        start_iter, max_iter: the loop runs ``iter`` from the one up to, not including, the other.
        iters_per_epoch: iterations in an epoch.
        labels_checksum: of the training images' labels, by which a resume knows them again; None knows nothing.
        processes: how many train together.
        metrics: what is written once a log period.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.iter = self.start_iter = self.max_iter = 0
        self.epoch = self.max_epoch = 0
        self.iters_per_epoch = 1
        self.labels_checksum: int | None = None
        self.processes = comm.get_world_size()
        self.metrics = MetricStore()

    def register_hooks(self, hooks: Iterable[HookBase]) -> None:
        """Add hooks; at each moment they are called in the order in which they were added, those that save last."""
        for hook in hooks:
            hook.trainer = self
            self._hooks.append(hook)
        self._hooks.sort(key=lambda hook: hook.saves)

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run iterations ``start_iter`` to ``max_epoch * iters_per_epoch - 1``."""
        self.iter = self.start_iter = start_iter
        self.max_epoch, self.iters_per_epoch = max_epoch, iters_per_epoch
        self.max_iter = max_epoch * iters_per_epoch
        self.epoch = start_iter // iters_per_epoch
        self._call("before_train")
        for iteration in range(start_iter, self.max_iter):
            self.iter = iteration
            self.epoch = self.iter // iters_per_epoch
            if self.iter == start_iter or self.iter % iters_per_epoch == 0:
                self._call("before_epoch")
            self._call("before_step")
            self.run_step()
            self._call("after_step")
            if (self.iter + 1) % iters_per_epoch == 0:
                self._call("after_epoch")
        self._call("after_train")

    def run_step(self) -> None:
        """Do one iteration."""
        raise NotImplementedError

    def batches_before(self, iteration: int) -> int:
        """Return how many batches of the whole training the iterations before ``iteration`` take: one each."""
        return iteration

    def _call(self, moment: str) -> None:
        for hook in self._hooks:
            getattr(hook, moment)()

    def state_dict(self) -> dict[str, Any]:
        """Return the next iteration, the length of an epoch, the number of processes, and the hooks' states."""
        return {
            "iteration": self.iter + 1,
            "iters_per_epoch": self.iters_per_epoch,
            "processes": self.processes,
            "labels_checksum": self.labels_checksum,
            "hooks": {name: hook.state_dict() for name, hook in self._hooks_by_name()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the iteration that ``state`` was made in; hooks must be registered already.

        Raises:
            ValueError: an epoch had another number of iterations, or the training images other labels.
        """
        if state["iters_per_epoch"] != self.iters_per_epoch:
            raise ValueError(
                f"an epoch had {state['iters_per_epoch']} iterations and has {self.iters_per_epoch} now: "
                "SOLVER.IMS_PER_BATCH, SOLVER.ACCUM_STEPS or the training data changed"
            )
        before = state.get("labels_checksum")
        if before is not None and self.labels_checksum is not None and before != self.labels_checksum:
            raise ValueError(
                "the training images are others, or have other identities, than before: DATASETS, or the data itself, "
                "changed"
            )
        processes = state.get("processes", self.processes)
        if processes != self.processes:
            logger.warning(
                "the checkpoint is of %d processes, this run has %d: the batches are the same; dropout, and batch norm "
                "and losses within each process's share, are not",
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
    """One optimizer step an iteration, in float32.

    ``AMPTrainer`` is the same step under another precision policy. Among several processes the gradients are averaged
    by PyTorch's DistributedDataParallel, and rank 0's batch-norm statistics are everybody's.

    Args:
        model: batch -> loss name -> (), in training mode.
        data_loader: yields batches without end. Where it has ``iters_per_epoch``, the batches of an epoch, the last
            step of an epoch takes what is left of them; otherwise every step takes ``accum_steps``.
        optimizers: all step, or none.
        policy: in which precision the forward pass runs.
        accum_steps: batches whose gradients are averaged for one step.
        on_failure: ``SOLVER.AMP.ON_FAILURE``: the dtype to go on in, once, when the policy's own cannot.
        precautions: the pre-flight, and what is done when a precision fails; None is nothing of that.
        scaler, clip, max_consecutive_skips, guard_buffers: see ``OptimizationStep``.
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
        precautions: Precautions | None = None,
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
        self.precautions = precautions or Precautions()
        self._first_dtype = policy.dtype
        self.batches_per_epoch: int | None = getattr(data_loader, "iters_per_epoch", None)
        self.steps_taken = 0
        self._parallel_model: nn.Module | None = None
        self._trainable: list[int] = []
        self.step = OptimizationStep(
            model,
            self.optimizers,
            scaler=scaler,
            clip=clip,
            max_consecutive_skips=max_consecutive_skips,
            guard_buffers=guard_buffers,
        )
        self._batches: Iterator[dict[str, Any]] | None = None

    @classmethod
    def from_config(
        cls, cfg: Any, *, model: nn.Module, data_loader: Iterable[dict[str, Any]], optimizers: Sequence[Optimizer]
    ) -> "SimpleTrainer":
        """Return the trainer, on the device of the model's parameters."""
        policy = cls.build_policy(cfg, next(model.parameters()).device)
        return cls(
            model,
            data_loader,
            optimizers,
            policy=policy,
            accum_steps=cfg.SOLVER.ACCUM_STEPS,
            on_failure=cfg.SOLVER.AMP.ON_FAILURE,
            precautions=Precautions.from_config(cfg),
            scaler=LossScaler.from_config(cfg, policy),
            clip=build_gradient_clipping(cfg),
            max_consecutive_skips=cfg.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
            guard_buffers=cfg.SOLVER.AMP.BN_GUARD,
        )

    @classmethod
    def build_policy(cls, cfg: Any, device: torch.device) -> PrecisionPolicy:
        """Return the precision policy that the trainer holds."""
        return PrecisionPolicy.float32(cfg, device)

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run the loop with the model in training mode."""
        # Here too, since a project's trainer may have a step of its own.
        self.precautions.check(self.step, self.policy)
        self.model.train()
        try:
            super().train(start_iter, max_epoch, iters_per_epoch)
        finally:
            self._batches = self._parallel_model = None  # ends the loader's workers
            self._trainable = []

    def batches_before(self, iteration: int) -> int:
        """Return how many batches of the whole training the iterations before ``iteration`` take.

        An iteration takes ``accum_steps``, and the last one of an epoch what is left.
        """
        if self.batches_per_epoch is None:
            return iteration * self.accum_steps
        epochs, within = divmod(iteration, -(-self.batches_per_epoch // self.accum_steps))
        return epochs * self.batches_per_epoch + min(within * self.accum_steps, self.batches_per_epoch)

    def run_step(self) -> None:
        """Forward and backward of each batch, verdict, and a step that is taken or skipped."""
        with Refusals(f"iteration {self.iter}", IN_TRAINING) as computing:
            self._run_step(computing)

    def _run_step(self, computing: Refusals) -> None:
        start, data_time = time.perf_counter(), 0.0
        model, is_new = self._parallel()
        count = self.batches_before(self.iter + 1) - self.batches_before(self.iter)
        history = []
        self.step.begin()
        for number in range(count):
            batch, seconds = self._next_batch()
            data_time += seconds
            first = self.iter == self.start_iter and number == 0
            if first:
                self.policy = self.precautions.before_first_step(self.step, batch, self.policy, iteration=self.iter)
                start = time.perf_counter() - seconds  # that was no part of the step
            computing.batch = batch
            self.precautions.remember(batch, first=number == 0)
            with nullcontext() if number == count - 1 else comm.no_sync(model):
                with self.policy.checked_autocast() if first else self.policy.autocast():
                    losses = model(batch)
                total_loss = self.step.backward(losses, share=1 / count)
            history.append({"total_loss": total_loss} | {name: loss.detach() for name, loss in losses.items()})
        if is_new:
            self._check_all_reached()
        verdict = self._finish()
        if verdict.ok:
            self.steps_taken += 1
            # Skipped steps stay out of every average: one infinite norm would make it infinite.
            for losses in history:
                self.metrics.average(**losses)
            self.metrics.average(grad_norm=verdict.grad_norm)
            if verdict.clip_coefficient is not None:
                self.metrics.average(clip_coefficient=verdict.clip_coefficient)
            if verdict.zero_share is not None:
                self.metrics.average(zero_gradients=verdict.zero_share)
        self.metrics.average(skip_ratio=float(not verdict.ok))
        self.metrics.latest(
            loss_scale=verdict.loss_scale,
            skipped_total=self.step.skipped_total,
            skipped_in_a_row=self.step.skipped_in_a_row,
        )
        self.metrics.average(data_time=data_time, time=time.perf_counter() - start)

    def _finish(self) -> StepVerdict:
        """Take or skip the step; fall back to another dtype where the config has one for a precision that fails.

        The steps that were skipped have changed neither weights nor statistics, so that the training goes on from
        the last good state.
        """
        try:
            return self.precautions.finish(self.step, self.policy, iteration=self.iter)
        except PrecisionFailure as failure:
            reason = f"fell back from {dtype_name(self.policy.dtype)} at iteration {self.iter}"
            fallback = self.policy.fall_back(self.on_failure, reason)
            if fallback is None:
                raise
            logger.warning("%s\nSOLVER.AMP.ON_FAILURE: going on in %s", failure, self.on_failure)
            self._change_policy(fallback)
            return failure.verdict

    def _change_policy(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.step.go_on_without_scaling()

    def _next_batch(self) -> tuple[dict[str, Any], float]:
        """Return the next batch and the seconds that it was waited for."""
        start = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self.data_loader)
        batch = next(self._batches)
        return batch, time.perf_counter() - start

    def _parallel(self) -> tuple[nn.Module, bool]:
        """Return the model as it is called in training, and whether that is a new DDP around it.

        DDP waits for a gradient of each parameter that was trainable when it was made, so it is made anew when
        others are, after a freeze.
        """
        if not comm.is_distributed():
            return self.model, False
        trainable = [id(p) for p in self.model.parameters() if p.requires_grad]
        if is_new := self._parallel_model is None or trainable != self._trainable:
            self._parallel_model, self._trainable = self.wrap_parallel(self.model), trainable
        check_communication(self._parallel_model, scaled=self.step.scaler is not None)
        return self._parallel_model, is_new

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        """Return ``model`` behind DDP; override it to register a communication hook."""
        return comm.data_parallel(model)

    def _check_all_reached(self) -> None:
        """Check that the losses reach every trainable parameter; DDP would wait for the others for ever.

        Raises:
            TrainingError: they do not.
        """
        missing = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if missing:
            raise TrainingError(
                f"no loss reaches {len(missing)} trainable parameters, e.g. {', '.join(missing[:3])}, and with several "
                "processes each must get a gradient.\n"
                "  fix: name a loss in MODEL.LOSSES.NAME that reaches them, or train in one process"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's state, the steps taken, the state of the step, and whether the precision was changed."""
        fallback = None
        if self.policy.dtype != self._first_dtype:
            fallback = {"from": dtype_name(self._first_dtype), "to": dtype_name(self.policy.dtype)}
        own = {"steps_taken": self.steps_taken, "step": self.step.state_dict(), "fallback": fallback}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        super().load_state_dict(state)
        self.steps_taken = state["steps_taken"]
        self.step.load_state_dict(state["step"])
        fallback = state["fallback"]
        if fallback and fallback["from"] == dtype_name(self.policy.dtype):
            policy = self.policy.fall_back(fallback["to"], f"fell back from {fallback['from']} before the resume")
            if policy is not None:
                self._change_policy(policy)


@TRAINER_REGISTRY.register()
class AMPTrainer(SimpleTrainer):
    """The same step in mixed precision: bfloat16, or float16 with a loss scale.

    Stays in float32 where the device has no low precision of its own and ``SOLVER.AMP.DTYPE`` is auto.
    """

    @classmethod
    def build_policy(cls, cfg: Any, device: torch.device) -> PrecisionPolicy:
        """Return the policy of ``SOLVER.AMP``."""
        return PrecisionPolicy.from_config(cfg, device)
