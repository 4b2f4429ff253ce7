"""Optimizer step: loss scaling, finiteness check, gradient clipping, update or skip."""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp.buffers import ForwardBuffers
from fastamp.amp.checks import (
    LARGEST_PARAMETER,
    NonFiniteParameters,
    ParameterUpdateMonitor,
    check_losses,
    explain_diverged,
    explain_no_gradient,
    magnitudes,
    warn_of_foreign_leaves,
    zero_fraction,
)
from fastamp.amp.model_tensors import ModelTensors
from fastamp.amp.module_monitor import ModuleMonitor
from fastamp.amp.policy import PrecisionPolicy
from fastamp.amp.row_update import gradient_values, step_rows
from fastamp.amp.sharded_norm import norms_over_ranks
from fastamp.config import CfgNode
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.sharding import row_shards

logger = logging.getLogger(__name__)

TINY_GRAD_NORM = 1e-3
"""Gradient norm below which the fraction of zero gradients is measured, as a sign of underflow."""

SKIP_WINDOW = 200
"""Number of recent steps that ``check_skips`` considers. Training ends if more than half of them were skipped."""

Clip = Callable[..., torch.Tensor]
"""``clip(gradients, total_norm) -> coefficient``: in-place gradient clipping, see ``fastamp.solver.clip``. For a model
with parameters in ``row_shards``, it is also called with ``sharded``, the indices of their gradients."""


@dataclass(kw_only=True, eq=False)
class LossScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    The scale is a Python float. The host reads the verdict of each step anyway, so an update of the scale requires no
    device tensor and no additional synchronization. Unlike in ``torch.amp.GradScaler``, the scale has a lower and an
    upper bound. Without a lower bound, 40 consecutive non-finite steps would reduce the scale from 65536 to 6e-8, and
    all gradients would underflow.

    Args:
        init_scale: initial scale, clamped to the bounds. Default 65536.
        growth_factor: factor applied to the scale after ``growth_interval`` consecutive finite steps. Default 2.
        backoff_factor: factor applied to the scale after a non-finite step. Default 0.5.
        growth_interval: number of consecutive finite steps before the scale grows. Default 2000.
        min_scale, max_scale: bounds of the scale. Default 1 and 2^24.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        self.scale = min(max(float(self.init_scale), self.min_scale), self.max_scale)
        self._good_steps = 0

    @classmethod
    def from_config(cls, cfg: CfgNode, policy: PrecisionPolicy) -> "LossScaler | None":
        """Build the loss scaler from ``SOLVER.AMP``; return None if ``policy`` does not need loss scaling."""
        if not policy.needs_loss_scaling:
            return None
        amp = cfg.SOLVER.AMP
        if not amp.MIN_SCALE <= amp.INIT_SCALE <= amp.MAX_SCALE:
            logger.warning(
                "SOLVER.AMP.INIT_SCALE=%g is not between MIN_SCALE=%g and MAX_SCALE=%g: using the nearest bound.\n"
                "  fix: set SOLVER.AMP.INIT_SCALE to a value between these bounds",
                amp.INIT_SCALE,
                amp.MIN_SCALE,
                amp.MAX_SCALE,
            )
        return cls(**{argument.name: amp[argument.name.upper()] for argument in dataclasses.fields(cls)})

    def update(self, ok: bool) -> None:
        """Update the scale after a step.

        Args:
            ok: True if the step was applied, False if it was skipped.
        """
        if not ok:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps >= self.growth_interval:
            self.scale = min(self.scale * self.growth_factor, self.max_scale)
            self._good_steps = 0

    def lower_to(self, scale: float) -> None:
        """Reduce the current scale to ``scale``. No effect if the current scale is already smaller."""
        self.scale = min(self.scale, scale)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the number of consecutive finite steps since the last change of the scale."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the scale and the number of finite steps."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])


@dataclass(frozen=True)
class StepVerdict:
    """Result of the finiteness check of one optimizer step.

    Attributes:
        ok: True if all losses and the gradient norm are finite on all ranks, so that the step is applied.
        grad_norm: total L2 norm of the unscaled gradients before clipping.
        loss_scale: loss scale of the backward pass; 1.0 without loss scaling.
        clip_coefficient: gradient norm after clipping divided by the norm before clipping; None without clipping or if
            ``ok`` is False. A scalar tensor on the device, to avoid a synchronization before the value is logged.
        bad_parameters: names of the parameters with a non-finite gradient; empty if ``ok`` is True.
        zero_fraction: scalar tensor with the fraction of gradient elements that are exactly zero, 0..1. Measured only
            if ``ok`` is True and ``grad_norm`` is below ``TINY_GRAD_NORM``, otherwise None.
    """

    ok: bool
    grad_norm: float
    loss_scale: float
    clip_coefficient: torch.Tensor | None = None
    bad_parameters: list[str] = field(default_factory=list)
    zero_fraction: torch.Tensor | None = None


class PrecisionFailure(TrainingError):
    """Raised if too many steps were skipped because their losses or gradients were not finite.

    Args:
        message: error message with cause and fix.
        verdict: verdict of the last skipped step.
        headline: summary of the error without cause and fix. Default: ``message``.
    """

    def __init__(self, message: str, verdict: StepVerdict, headline: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict
        self.headline = headline or message


@dataclass(frozen=True)
class Gradients:
    """Unscaled gradients of one step.

    Attributes:
        optimizers: optimizers with at least one gradient. Other optimizers do not step.
        parameters: N parameters with a gradient, without duplicates.
        tensors: gradients of ``parameters``, in the same order; of a sparse gradient, the rows that have one.
        norms: (N,), L2 norm of each gradient, for parameters in ``row_shards`` over the rows of all ranks.
        total_norm: scalar tensor, L2 norm of all gradients together.
        sharded: indices of the parameters in ``row_shards``.
    """

    optimizers: list[Optimizer]
    parameters: list[nn.Parameter]
    tensors: list[torch.Tensor]
    norms: torch.Tensor
    total_norm: torch.Tensor
    sharded: Sequence[int] = ()


class OptimizationStep:
    """One optimizer step, split into methods. All optimizers on all ranks apply or skip the step together.

    In a training loop:

        step.zero_grad()                       # also copies the buffers that forward passes modify
        with policy.autocast():
            losses = model(batch)
        step.scale(losses).backward()
        step.finish()                          # or the methods it calls, as in ``SimpleTrainer.run_step``

    The verdict is computed from the losses and the unscaled gradient norm. A change of the loss scale is not a reliable
    sign of a skipped step: the scale also changes when it grows, and a static scale never changes. There is
    one device-to-host copy per step, in ``check_finite``.

    Args:
        model: module that owns the parameters; messages use its parameter names.
        optimizers: optimizers of the model. An optimizer whose parameters have no gradient does not step.
        scaler: loss scaling for float16; None for bfloat16 and float32.
        clip: ``clip(gradients, total_norm) -> coefficient``, applied in place to the unscaled gradients.
        max_consecutive_skips: largest allowed number of consecutive skipped steps. Default 25.
        guard_buffers: whether ``zero_grad`` copies the buffers that forward passes modify and ``skip`` restores them,
            see ``ForwardBuffers``. Default True.
        rank_maxima: numbers whose maxima over all ranks are computed in the all-reduce of the verdict; None (default)
            adds no numbers.

    Attributes:
        clip: see Args.
        tensors: cached lists of the model's modules and parameters.
        total_loss: scalar tensor, detached sum of the losses last passed to ``scale``; None before the first call.
        loss_names: names of the losses last passed to ``scale``.
        skipped_total, skipped_in_a_row: number of skipped steps, in total and consecutive.
        frozen: names of frozen modules, see ``set_frozen``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        scaler: LossScaler | None = None,
        clip: Clip | None = None,
        max_consecutive_skips: int = 25,
        guard_buffers: bool = True,
        rank_maxima: comm.RankMaxima | None = None,
    ) -> None:
        self.model = model
        self.tensors = ModelTensors(model)
        self.buffers = ForwardBuffers(model, self.tensors) if guard_buffers else None
        self.optimizers = list(optimizers)
        self.scaler = scaler
        self.max_consecutive_skips = max_consecutive_skips
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self._recent: deque[bool] = deque(maxlen=SKIP_WINDOW)  # True for a skipped step
        self.frozen: Sequence[str] = ()
        self._verdict: StepVerdict | None = None
        self.clip = clip
        self.total_loss: torch.Tensor | None = None
        self.loss_names: tuple[str, ...] = ()
        self._rank_maxima = rank_maxima or comm.RankMaxima()
        self._losses_finite: torch.Tensor | None = None
        self._leaves_checked = False
        self._diverged: list[str] = []
        self._positions = {id(p): number for number, p in enumerate(model.parameters())}
        self._orders: dict[int, tuple[list[int], list[nn.Parameter]]] = {}
        self._sharded: tuple[int, set[int]] = (0, set())
        self._update_monitor = ParameterUpdateMonitor(self.optimizers)
        self._module_monitor = ModuleMonitor(model, self.optimizers)

    @classmethod
    def from_config(
        cls, cfg: CfgNode, model: nn.Module, optimizers: Sequence[Optimizer], policy: PrecisionPolicy, clip: Clip | None
    ) -> "OptimizationStep":
        """Build the optimizer step from ``SOLVER.AMP``, with loss scaling if ``policy`` needs it."""
        step = cls(
            model,
            optimizers,
            scaler=LossScaler.from_config(cfg, policy),
            clip=clip,
            max_consecutive_skips=cfg.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
            guard_buffers=cfg.SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP,
        )
        step.set_monitor_period(cfg.LOG_PERIOD)
        return step

    @property
    def verdict(self) -> StepVerdict:
        """Verdict of the last step."""
        assert self._verdict is not None, "before the first step"
        return self._verdict

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1 without loss scaling."""
        return self.scaler.scale if self.scaler else 1.0

    def set_monitor_period(self, period: int) -> None:
        """Set the number of applied steps between two checks of ``ModuleMonitor``. Default 50."""
        self._module_monitor.set_period(period)

    def set_frozen(self, modules: Sequence[str]) -> None:
        """Set the names of the frozen modules. A loss that depends only on frozen modules is then not an error.

        Args:
            modules: module names from ``MODEL.FREEZE_LAYERS``; empty if all modules train.
        """
        self.frozen = modules

    def zero_grad(self) -> None:
        """Set all gradients to None, and copy the buffers that the forward passes of this step will modify."""
        self.tensors.refresh()
        self._clear_gradients()
        if self.buffers:
            self.buffers.save()

    def scale(self, losses: dict[str, torch.Tensor], weight: float = 1.0) -> torch.Tensor:
        """Sum the losses of one micro-batch, and multiply the sum by ``weight`` and the loss scale.

        Args:
            losses: loss name -> float32 scalar tensor, as returned by the model.
            weight: weight of the micro-batch in the step: 1/k if gradients are accumulated over k micro-batches.

        Returns:
            Scaled total loss: scalar tensor on which to call ``backward``.

        Raises:
            TrainingError: see ``check_losses``.
        """
        check_losses(losses, frozen=self.frozen, model=None if self._update_monitor.finished else self.model)
        if not self._leaves_checked:
            self._leaves_checked = True
            warn_of_foreign_leaves(losses, self.model)
        self.loss_names = tuple(losses)
        total = torch.stack(list(losses.values())).sum()
        self.total_loss = total.detach()
        finite = torch.isfinite(self.total_loss)
        self._losses_finite = finite if self._losses_finite is None else self._losses_finite & finite
        return total * (weight * self.loss_scale)

    @torch.no_grad()
    def unscale(self) -> Gradients:
        """Divide the gradients by the loss scale, in place, and compute their norms.

        Raises:
            TrainingError: if no parameter in the optimizers has a gradient.
            RuntimeError: if ``scale`` has not been called.
        """
        if self._losses_finite is None:
            raise RuntimeError("unscale() must be called after scale() and backward()")
        active = [opt for opt in self.optimizers if any(p.grad is not None for p in _parameters(opt))]
        if not active:
            raise TrainingError(explain_no_gradient(self.model, self.optimizers))
        candidates = [p for opt in active for p in self._in_order(opt)]
        # A parameter in two optimizers must be unscaled only once.
        parameters = list({id(p): p for p in candidates if p.grad is not None}.values())
        tensors = [gradient_values(p) for p in parameters]
        if self.loss_scale != 1.0:
            torch._foreach_mul_(tensors, 1.0 / self.loss_scale)
        sharded_ids = self._sharded_ids()
        sharded = [number for number, p in enumerate(parameters) if id(p) in sharded_ids]
        norms = torch.stack(torch._foreach_norm(tensors))
        norms = norms_over_ranks(norms, sharded)
        return Gradients(active, parameters, tensors, norms, torch.linalg.vector_norm(norms), sharded)

    def check_finite(self, gradients: Gradients) -> StepVerdict:
        """Check that all losses and gradients are finite on all ranks, with one all-reduce and one device-to-host copy.

        The same all-reduce computes the maxima in ``rank_maxima``.

        Raises:
            TrainingError: if the first steps did not change any parameter; see ``ParameterUpdateMonitor``.
        """
        assert self._losses_finite is not None  # checked by unscale
        finite = (torch.isfinite(gradients.total_norm) & self._losses_finite).float()
        self._losses_finite = None
        numbers = self._rank_maxima.local()
        # max(x) = -min(-x). Unlike torch.tensor, new_full does not copy from the host to the device.
        reduced = comm.all_reduce_min(torch.stack([finite, *(finite.new_full((), -number) for number in numbers)]))
        pending = [gradients.total_norm, *self._update_monitor.pending]
        values = torch.cat([reduced, torch.stack(pending), *self._module_monitor.pending]).tolist()
        (all_ok, *negative), (grad_norm, *measured) = values[: len(reduced)], values[len(reduced) :]
        self._rank_maxima.store([-number for number in negative])
        self._update_monitor.check(*measured[: len(pending) - 1])
        self._module_monitor.check(measured[len(pending) - 1 :], quiet=self._update_monitor.reported)
        ok = bool(all_ok)
        self._verdict = StepVerdict(
            ok,
            grad_norm,
            self.loss_scale,
            bad_parameters=[] if ok else self._non_finite_names(gradients),
            zero_fraction=zero_fraction(gradients.tensors) if ok and grad_norm < TINY_GRAD_NORM else None,
        )
        return self.verdict

    def clip_gradients(self, gradients: Gradients) -> None:
        """Clip the gradients in place with ``clip``, if set."""
        if self.clip:
            sharded = {"sharded": gradients.sharded} if gradients.sharded else {}
            coefficient = self.clip(gradients.tensors, gradients.total_norm, **sharded)
            self._verdict = dataclasses.replace(self.verdict, clip_coefficient=coefficient)

    def apply(self, gradients: Gradients) -> None:
        """Step all optimizers whose parameters have gradients, then clear the gradients."""
        self._update_monitor.before_step()
        self._module_monitor.before_step(self.frozen)
        for optimizer in gradients.optimizers:
            step_rows(optimizer)
        self._update_monitor.after_step(self.verdict.grad_norm)
        self._module_monitor.after_step()
        self._module_monitor.check_scale(self.scaler.scale if self.scaler else None)
        self.skipped_in_a_row = 0
        self._recent.append(False)
        if self.buffers:
            self.buffers.discard()
        self._drop_gradients()

    def skip(self) -> None:
        """Skip the update: restore the buffers, clear the gradients, count and log the skip.

        Raises:
            NonFiniteParameters: if parameters are not finite, or are so large that the forward pass overflows.
        """
        self.skipped_total += 1
        self.skipped_in_a_row += 1
        self._recent.append(True)
        if self.buffers:
            self.buffers.restore()
        self._drop_gradients()
        if self._diverged:
            raise NonFiniteParameters(explain_diverged(self._diverged))
        # All of the first ten, then 20, 30, ..., 100, 200, ...
        if self.skipped_total % 10 ** (len(str(self.skipped_total)) - 1) == 0:
            logger.warning(
                "step skipped (%d in a row, %d in total): %s; loss scale %g",
                self.skipped_in_a_row,
                self.skipped_total,
                self._describe_non_finite(),
                self.verdict.loss_scale,
            )

    def update_scale(self, ok: bool) -> None:
        """Update the loss scale after a step. No effect without loss scaling.

        Args:
            ok: True if the step was applied, False if it was skipped.
        """
        if self.scaler:
            self.scaler.update(ok)

    def check_skips(self) -> None:
        """Check the number of consecutive skipped steps, and the fraction of skipped steps.

        Raises:
            PrecisionFailure: if more than ``max_consecutive_skips`` consecutive steps were skipped, or if the
                number of skipped steps among the last ``SKIP_WINDOW`` steps exceeds both ``SKIP_WINDOW / 2`` and
                ``max_consecutive_skips``.
        """
        recent = sum(self._recent)
        if self.skipped_in_a_row > self.max_consecutive_skips:
            count = f"{self.skipped_in_a_row} optimizer steps in a row were skipped"
            limit = f"SOLVER.AMP.MAX_CONSECUTIVE_SKIPS ({self.max_consecutive_skips})"
        elif recent > max(SKIP_WINDOW // 2, self.max_consecutive_skips):
            count = f"{recent} of the last {len(self._recent)} optimizer steps were skipped"
            limit = f"half of {SKIP_WINDOW}"
        else:
            return
        at_minimum = self.scaler is not None and self.scaler.scale <= self.scaler.min_scale
        cause = (
            "the loss scale is at its minimum, SOLVER.AMP.MIN_SCALE: values of this model exceed the range of float16."
            if at_minimum
            else "a loss or a gradient is Inf or NaN, although loss scaling is not in use."
            if self.scaler is None
            else "float16 overflows repeatedly."
        )
        fix = "reduce SOLVER.BASE_LR, enable SOLVER.CLIP_GRADIENTS, or check the training data"
        if self.scaler is not None:
            fix = f"try SOLVER.AMP.DTYPE bfloat16 or SOLVER.AMP False; if that also fails, {fix}"
        headline = (
            f"{count}, more than {limit}.\n"
            f"  found: {self._describe_non_finite()}; loss scale {self.verdict.loss_scale:g}"
        )
        raise PrecisionFailure(f"{headline}\n  cause: {cause}\n  fix:   {fix}", self.verdict, headline)

    def finish(self) -> StepVerdict:
        """Unscale, check and clip the gradients, step or skip, and update the loss scale.

        Shorthand for custom training loops. ``SimpleTrainer.run_step`` does not call ``finish``, but calls the same
        methods in the same order. A subclass must therefore override these methods and not ``finish``.

        Returns:
            Verdict of the step.

        Raises:
            TrainingError, PrecisionFailure: see ``unscale``, ``check_finite``, ``skip`` and ``check_skips``.
        """
        gradients = self.unscale()
        ok = self.check_finite(gradients).ok
        if ok:
            self.clip_gradients(gradients)
            self.apply(gradients)
        else:
            self.skip()
        self.update_scale(ok)
        self.check_skips()
        return self.verdict

    def disable_loss_scaling(self) -> None:
        """Disable loss scaling and forget recent skipped steps, after a fallback to bfloat16 or float32."""
        self.scaler = None
        self.skipped_in_a_row = 0
        self._recent.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaler, and the total and consecutive numbers of skipped steps."""
        return {
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers of skipped steps, and the loss scale if the old run and this run use loss scaling."""
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        elif self.scaler:
            logger.info("the checkpoint has no loss scale: starting with a loss scale of %g", self.scaler.scale)
        elif state["scaler"]:
            logger.info(
                "ignoring the loss scale of the checkpoint (%g): this run does not use loss scaling",
                state["scaler"]["scale"],
            )

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._clear_gradients()  # gradients of parameters without an optimizer would accumulate

    def _clear_gradients(self) -> None:
        for parameter in self.tensors.parameters:
            parameter.grad = None

    def _sharded_ids(self) -> set[int]:
        """Return the ids of the parameters in ``row_shards``; cached until the model changes."""
        version = self.tensors.refresh()
        if version != self._sharded[0]:
            shards = row_shards(self.model)
            self._sharded = version, {id(p) for name, p in self.model.named_parameters() if name in shards}
        return self._sharded[1]

    def _in_order(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of an optimizer in the order of ``norm_order``, which is cached."""
        ids = [id(p) for p in _parameters(optimizer)]
        cached_ids, order = self._orders.get(id(optimizer), (None, []))
        if ids != cached_ids:
            order = norm_order(optimizer, self._positions)
            self._orders[id(optimizer)] = ids, order
        return order

    def _non_finite_names(self, gradients: Gradients) -> list[str]:
        """List the parameters with a non-finite gradient. The same device-to-host copy detects diverged parameters."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.is_floating_point()}
        small = magnitudes(parameters.values()) <= LARGEST_PARAMETER
        flags = torch.cat([torch.isfinite(gradients.norms), small]).tolist()
        finite, within = flags[: len(gradients.norms)], flags[len(gradients.norms) :]
        self._diverged = [name for name, ok in zip(parameters, within, strict=True) if not ok]
        names = {id(p): name for name, p in parameters.items()}
        pairs = zip(gradients.parameters, finite, strict=True)
        return [names.get(id(p), "(not a parameter of the model)") for p, ok in pairs if not ok]

    def _describe_non_finite(self) -> str:
        bad = self.verdict.bad_parameters
        if bad:
            return f"{len(bad)} gradients are not finite, e.g. {', '.join(bad[:3])}"
        return "a loss or the total gradient norm is not finite"


def norm_order(optimizer: Optimizer, positions: Mapping[int, int]) -> list[nn.Parameter]:
    """Return the parameters of an optimizer in the order in which their gradient norms are summed.

    They are grouped by learning rate and weight decay instead of by role, so that rounding, and therefore clipping by
    the global norm, does not depend on the number of roles.

    Args:
        optimizer: optimizer of the parameters. If a group has no ``role`` (built outside of fastamp), the order of the
            groups is kept.
        positions: ``id(parameter)`` -> index in ``model.parameters()``.
    """
    if not all("role" in group for group in optimizer.param_groups):
        return _parameters(optimizer)
    values = {
        id(p): (group["base_lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in sorted(_parameters(optimizer), key=lambda p: positions.get(id(p), len(positions))):
        groups.setdefault(values[id(parameter)], []).append(parameter)
    return [parameter for group in groups.values() for parameter in group]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
