"""The training loop, and the one training step."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.amp.policy import dtype_name
from fastamp.amp.step import Clip
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine.hooks.base import HookBase
from fastamp.engine.hooks.precision import DeviceErrors, ParallelChecks, PrecisionHook
from fastamp.solver import build_gradient_clipping
from fastamp.utils import comm
from fastamp.utils.events import MetricStore
from fastamp.utils.moved import renamed_arguments, renamed_attribute
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
        labels_checksum: CRC32 of the training labels, verified on resume; None disables the check.
        processes: how many train together.
        metrics: what is written once a log period.
    """

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self._internal_hooks: list[HookBase] = []
        self._callbacks: dict[str, list[Callable[..., None]]] = {}
        self._in_step = False
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
        self._callbacks.clear()

    def attach_internal_hooks(self, *hooks: HookBase) -> None:
        """Add hooks that belong to the trainer, and have no state to save.

        They are called before all others, but last at ``before_forward``. ``step_context`` calls their ``before_step``
        and ``after_step``, so that they also run for a ``run_step`` outside ``train``.
        """
        for hook in hooks:
            hook.trainer = self
            self._internal_hooks.append(hook)
        self._callbacks.clear()

    def set_data(self, iters_per_epoch: int, labels_checksum: int | None = None) -> None:
        """Set what a resume compares: the iterations in an epoch, and the checksum of the training labels."""
        self.iters_per_epoch, self.labels_checksum = iters_per_epoch, labels_checksum

    def move_to(self, iteration: int, max_epoch: int) -> None:
        """Set ``iter`` and ``epoch`` to those of an iteration of a training of ``max_epoch`` epochs."""
        self.max_epoch, self.max_iter = max_epoch, max_epoch * self.iters_per_epoch
        self.iter, self.epoch = iteration, iteration // self.iters_per_epoch

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run iterations ``start_iter`` to ``max_epoch * iters_per_epoch - 1``."""
        self.start_iter, self.iters_per_epoch = start_iter, iters_per_epoch
        self._callbacks.clear()
        self.move_to(start_iter, max_epoch)
        self.call_hooks("before_train")
        for iteration in range(start_iter, self.max_iter):
            self.move_to(iteration, max_epoch)
            if self.iter == start_iter or self.iter % iters_per_epoch == 0:
                self.call_hooks("before_epoch")
            self.call_hooks("before_step")
            with self.step_context():
                self.run_step()
            self.call_hooks("after_step")
            if (self.iter + 1) % iters_per_epoch == 0:
                self.call_hooks("after_epoch")
        self.call_hooks("after_train")

    def run_step(self) -> None:
        """Do one iteration."""
        raise NotImplementedError

    def batches_before(self, iteration: int) -> int:
        """Return how many batches of the whole training the iterations before ``iteration`` take: one each."""
        return iteration

    def call_hooks(self, moment: str, *args: Any) -> None:
        """Call the method ``moment`` of every hook, see ``attach_internal_hooks`` for the order."""
        if moment not in self._callbacks:
            self._callbacks[moment] = self._overridden(moment)
        for callback in self._callbacks[moment]:
            callback(*args)

    def _overridden(self, moment: str) -> list[Callable[..., None]]:
        """Return the hooks' methods for ``moment`` in call order, without those inherited from ``HookBase``."""
        own = [] if moment in ("before_step", "after_step") else self._internal_hooks
        # Registered hooks may change a batch, and the own ones record what the model is given.
        order = (*self._hooks, *own) if moment == "before_forward" else (*own, *self._hooks)
        methods = [getattr(hook, moment) for hook in order]
        base = getattr(HookBase, moment, None)
        return [method for method in methods if base is None or getattr(method, "__func__", None) is not base]

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Let the trainer's own hooks act before and after a step, and show an error in it to all hooks, once.

        Within itself it does nothing: ``train`` and ``run_step`` both use it, because either may be overridden.
        """
        if self._in_step:
            yield
            return
        self._in_step = True
        try:
            for hook in self._internal_hooks:
                hook.before_step()
            yield
            for hook in self._internal_hooks:
                hook.after_step()
        except Exception as error:
            self._notify_error(error)
            raise
        finally:
            self._in_step = False

    def _notify_error(self, error: Exception) -> None:
        """Call every hook's ``on_step_error``, then raise the first error that one of them raised, if any."""
        first = None
        for hook in (*self._internal_hooks, *self._hooks):
            try:
                hook.on_step_error(error)
            except Exception as other:
                if first is not None:
                    logger.warning("%s.on_step_error raised as well: %s", type(hook).__name__, other)
                first = first or other
        if first is not None:
            raise first

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
        precision_diagnostics: the pre-flight, and what is done when a precision fails; None is nothing of that.
        scaler, clip, max_consecutive_skips, guard_buffers: see ``OptimizationStep``.

    Attributes:
        on_failure, precision_diagnostics: as above; a later assignment takes effect from the next step.
    """

    @renamed_arguments(precautions="precision_diagnostics")
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
        self.step = OptimizationStep(
            model,
            self.optimizers,
            scaler=scaler,
            clip=clip,
            max_consecutive_skips=max_consecutive_skips,
            guard_buffers=guard_buffers,
        )
        self.attach_internal_hooks(PrecisionHook(), ParallelChecks(), DeviceErrors())
        self._first_dtype = policy.dtype
        self._autocast_checked = False
        self._parallel_model: nn.Module | None = None
        self._trainable: list[int] = []
        self._batches: Iterator[dict[str, Any]] | None = None
        self._start_clock()

    precautions = renamed_attribute("precautions", "precision_diagnostics")

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
            precision_diagnostics=PrecisionDiagnostics.from_config(cfg),
            scaler=LossScaler.from_config(cfg, policy),
            clip=build_gradient_clipping(cfg),
            max_consecutive_skips=cfg.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
            guard_buffers=cfg.SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP,
        )

    @classmethod
    def build_policy(cls, cfg: Any, device: torch.device) -> PrecisionPolicy:
        """Return the precision policy that the trainer holds."""
        return PrecisionPolicy.float32(cfg, device)

    def train(self, start_iter: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run the loop with the model in training mode."""
        self.model.train()
        self._autocast_checked = False
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
        """Train on the batches of one step, which is taken if all losses and gradients are finite.

        Raises:
            PrecisionFailure: too many steps in a row were skipped.
        """
        with self.step_context():  # explains errors, and ends a training that skips too many steps
            self._start_clock()
            model, step, history = self.parallel_model(), self.step, []
            count = self.batches_before(self.iter + 1) - self.batches_before(self.iter)
            step.zero_grad()  # also copies the buffers that forward passes write
            for number in range(count):
                batch = self.next_batch()
                self.call_hooks("before_forward", batch)
                with nullcontext() if number == count - 1 else comm.no_sync(model):  # DDP averages after the last batch
                    with self.autocast():
                        losses = model(batch)
                    step.scale(losses, weight=1 / count).backward()
                history.append({"total_loss": step.total_loss} | {name: loss.detach() for name, loss in losses.items()})
            self.call_hooks("after_backward")
            gradients = step.unscale()
            verdict = step.check_finite(gradients)  # on all ranks; the only time that the host waits for the device
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

    def autocast(self) -> AbstractContextManager[None]:
        """Return the policy's context; around the first forward pass it checks that mixed precision has an effect."""
        if self._autocast_checked:
            return self.policy.autocast()
        self._autocast_checked = True
        return self.policy.checked_autocast()

    def parallel_model(self) -> nn.Module:
        """Return the model as it is called in training: behind DDP among several processes, else itself.

        DDP waits for a gradient of each parameter that was trainable when it was made, so it is made again when others
        are, after a freeze.
        """
        if not comm.is_distributed():
            return self.model
        trainable = [id(p) for p in self.model.parameters() if p.requires_grad]
        if self._parallel_model is None or trainable != self._trainable:
            self._parallel_model, self._trainable = self.wrap_parallel(self.model), trainable
        return self._parallel_model

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        """Return ``model`` behind DDP; override it to register a communication hook."""
        return comm.data_parallel(model)

    def set_policy(self, policy: PrecisionPolicy) -> None:
        """Continue under another policy, without loss scaling."""
        if policy is not self.policy:
            self.policy = policy
            self.step.disable_loss_scaling()

    def record_metrics(self, losses: Sequence[dict[str, torch.Tensor]]) -> None:
        """Add the figures of the step that ends to the metrics.

        Args:
            losses: of each of its batches, detached, with their sum as ``total_loss``.
        """
        step, verdict = self.step, self.step.verdict
        if verdict.ok:
            # Skipped steps stay out of every average: one infinite norm would make it infinite.
            for each in losses:
                self.metrics.average(**each)
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
        """Exclude ``seconds`` of the current step from the metric ``time``, e.g. those of the pre-flight."""
        self._step_began += seconds

    def _start_clock(self) -> None:
        self._data_seconds = 0.0
        self._step_began = time.perf_counter()

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
                self.set_policy(policy)


@TRAINER_REGISTRY.register()
class AMPTrainer(SimpleTrainer):
    """The same step in mixed precision: bfloat16, or float16 with a loss scale.

    Stays in float32 where the device has no low precision of its own and ``SOLVER.AMP.DTYPE`` is auto.
    """

    @classmethod
    def build_policy(cls, cfg: Any, device: torch.device) -> PrecisionPolicy:
        """Return the policy of ``SOLVER.AMP``."""
        return PrecisionPolicy.from_config(cfg, device)
