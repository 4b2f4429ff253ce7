"""The optimizer step: loss scaling, the verdict on its gradients, clipping, step or skip."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp.buffers import ForwardBuffers
from fastamp.amp.checks import ParameterUpdateMonitor, check_losses, explain_no_gradient, zero_fraction
from fastamp.amp.policy import PrecisionPolicy
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.moved import renamed_attribute

logger = logging.getLogger(__name__)

TINY_GRAD_NORM = 1e-3
"""Below this gradients may have been rounded to zero: it is looked at how many of them are."""

Clip = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]
"""``clip(gradients, total_norm) -> coefficient``: the rule (``fastamp.solver.clip``) that a step applies in place."""


class LossScaler:
    """The dynamic loss scale of float16 training (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    The scale lives on the host: the verdict of a step is read there anyway, so that its update needs no
    device tensor and no synchronization of its own. Differs from ``torch.amp.GradScaler`` in the floor and the
    ceiling: without a floor, 40 bad steps leave a scale of 6e-8 and gradients that are all zero.

    Args:
        init_scale: the first scale.
        growth_factor, growth_interval: the scale grows by the factor after so many good steps in a row.
        backoff_factor: the scale is multiplied by this after a bad step.
        min_scale, max_scale: bounds of the scale.
    """

    def __init__(
        self,
        *,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        self.scale = min(max(float(init_scale), min_scale), max_scale)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self._good_steps = 0

    @classmethod
    def from_config(cls, cfg: Any, policy: PrecisionPolicy) -> "LossScaler | None":
        """Return the scaler of ``SOLVER.AMP`` where ``policy`` needs one, else None."""
        if not policy.needs_loss_scaling:
            return None
        amp = cfg.SOLVER.AMP
        if not amp.MIN_SCALE <= amp.INIT_SCALE <= amp.MAX_SCALE:
            logger.warning(
                "SOLVER.AMP.INIT_SCALE %g is not between MIN_SCALE %g and MAX_SCALE %g: the nearer of them is taken",
                amp.INIT_SCALE,
                amp.MIN_SCALE,
                amp.MAX_SCALE,
            )
        return cls(
            init_scale=amp.INIT_SCALE,
            growth_factor=amp.GROWTH_FACTOR,
            backoff_factor=amp.BACKOFF_FACTOR,
            growth_interval=amp.GROWTH_INTERVAL,
            min_scale=amp.MIN_SCALE,
            max_scale=amp.MAX_SCALE,
        )

    def update(self, ok: bool) -> None:
        """Grow or shrink the scale after a step that was taken (``ok``) or skipped."""
        if not ok:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale = min(self.scale * self.growth_factor, self.max_scale)
            self._good_steps = 0

    def lower_to(self, scale: float) -> None:
        """Continue with ``scale`` where it is below the present one."""
        self.scale = min(self.scale, scale)

    def state_dict(self) -> dict[str, float]:
        """Return the scale and the count of good steps since it last changed."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from ``state``."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])


@dataclass(frozen=True)
class StepVerdict:
    """What became of one optimizer step.

    Attributes:
        ok: whether every loss and the gradient norm were finite on every rank, and the step was taken.
        grad_norm: total L2 norm of the unscaled gradients before clipping; not finite when not ``ok``.
        loss_scale: the scale under which the gradients were computed; 1.0 without loss scaling.
        clip_coefficient: (), the gradients' norm after clipping over the norm before; None without clipping or
            when not ``ok``. A tensor, so that nobody waits for the device before it is written.
        bad_parameters: names of the parameters whose gradient was not finite, when not ``ok``.
        zero_fraction: (), the fraction of the gradients' elements that are exactly zero, where the norm is below
            ``TINY_GRAD_NORM``; else None.
    """

    ok: bool
    grad_norm: float
    loss_scale: float
    clip_coefficient: torch.Tensor | None = None
    bad_parameters: list[str] = field(default_factory=list)
    zero_fraction: torch.Tensor | None = None

    zero_share = renamed_attribute("zero_share", "zero_fraction")


class PrecisionFailure(TrainingError):
    """Steps are skipped again and again: the precision that the model computes in, or the model, cannot go on.

    Args:
        message: for the user.
        verdict: of the last step, which was skipped like those before it.
        headline: the message without cause and cure, for who knows them better.
    """

    def __init__(self, message: str, verdict: StepVerdict, headline: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict
        self.headline = headline or message


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step, after unscaling.

    Attributes:
        optimizers: those that hold a parameter with a gradient; the others take no part in the step.
        parameters: with a gradient, each once.
        tensors: their gradients, in the same order.
        norms: (N,), the L2 norm of each.
        total_norm: (), the L2 norm of all.
    """

    optimizers: list[Optimizer]
    parameters: list[nn.Parameter]
    tensors: list[torch.Tensor]
    norms: torch.Tensor
    total_norm: torch.Tensor


class OptimizationStep:
    """The parts of one optimizer step, which is taken or skipped as a whole, on all ranks alike.

    ::

        step.zero_grad()                       # and copy the buffers that forward passes write
        with policy.autocast():
            losses = model(batch)
        step.scale(losses).backward()
        step.finish()                          # or its parts one by one, as ``SimpleTrainer.run_step``

    The verdict is the finiteness of losses and of the unscaled gradient norm: not a change of the scale, which a
    growing scale fakes and a static one never shows. All optimizers step or none does. The host reads the device once
    a step, in ``check_finite``.

    Args:
        model: names the parameters in messages.
        optimizers: those whose parameters have a gradient take part in a step; the others are left out of it.
        scaler: the loss scale of float16; None for bfloat16 and float32.
        clip: ``clip(gradients, total_norm) -> coefficient``, applied in place to unscaled gradients.
        max_consecutive_skips: more skipped steps in a row than this end the training.
        guard_buffers: ``zero_grad`` copies what forward passes write, see ``ForwardBuffers``, and ``skip`` restores it.

    Attributes:
        clip: as above.
        verdict: of the last step; None before the first.
        total_loss: (), sum of the losses last passed to ``scale``, detached; None before the first.
        skipped_total, skipped_in_a_row: counts of skipped steps.
        frozen: modules that are frozen on purpose, see ``set_frozen``.
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
    ) -> None:
        self.model = model
        self.buffers = ForwardBuffers(model) if guard_buffers else None
        self.optimizers = list(optimizers)
        self.scaler = scaler
        self.max_consecutive_skips = max_consecutive_skips
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self.frozen: Sequence[str] = ()
        self.verdict: StepVerdict | None = None
        self.clip = clip
        self.total_loss: torch.Tensor | None = None
        self._losses_finite: torch.Tensor | None = None
        self._positions = {id(p): number for number, p in enumerate(model.parameters())}
        self._orders: dict[int, tuple[list[int], list[nn.Parameter]]] = {}
        self._update_monitor = ParameterUpdateMonitor(self.optimizers)

    @classmethod
    def from_config(
        cls, cfg: Any, model: nn.Module, optimizers: Sequence[Optimizer], policy: PrecisionPolicy, clip: Clip | None
    ) -> "OptimizationStep":
        """Return the step of ``SOLVER.AMP`` under ``policy``."""
        return cls(
            model,
            optimizers,
            scaler=LossScaler.from_config(cfg, policy),
            clip=clip,
            max_consecutive_skips=cfg.SOLVER.AMP.MAX_CONSECUTIVE_SKIPS,
            guard_buffers=cfg.SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP,
        )

    @property
    def loss_scale(self) -> float:
        """The present loss scale; 1 without loss scaling."""
        return self.scaler.scale if self.scaler else 1.0

    def set_frozen(self, modules: Sequence[str]) -> None:
        """Name the modules that are frozen on purpose: while there are any, some losses may reach no parameter."""
        self.frozen = modules

    def zero_grad(self) -> None:
        """Drop all gradients, and copy the buffers that the forward passes of this step will write."""
        self.model.zero_grad(set_to_none=True)
        if self.buffers:
            self.buffers.keep()

    def scale(self, losses: dict[str, torch.Tensor], weight: float = 1.0) -> torch.Tensor:
        """Return the sum of the losses of one micro-batch times ``weight`` and the loss scale, for its backward pass.

        Args:
            losses: loss name -> (), float32, as the model returned them.
            weight: of this micro-batch in the step, 1/k under accumulation over k.

        Raises:
            TrainingError: no loss, a loss that is no float32 scalar, or one that no parameter reaches.
        """
        check_losses(losses, frozen=self.frozen, model=None if self._update_monitor.finished else self.model)
        total = torch.stack(list(losses.values())).sum()
        self.total_loss = total.detach()
        finite = torch.isfinite(self.total_loss)
        self._losses_finite = finite if self._losses_finite is None else self._losses_finite & finite
        return total * (weight * self.loss_scale)

    @torch.no_grad()
    def unscale(self) -> Gradients:
        """Divide the gradients by the loss scale, in place, and return them with their norms.

        Raises:
            TrainingError: no optimizer has a gradient at all.
        """
        if self._losses_finite is None:
            raise RuntimeError("unscale() without a backward pass of scale() before it")
        active = [opt for opt in self.optimizers if any(p.grad is not None for p in _parameters(opt))]
        if not active:
            raise TrainingError(explain_no_gradient(self.model, self.optimizers))
        held = [p for opt in active for p in self._in_order(opt)]
        # One that two optimizers hold is still unscaled once.
        parameters = list({id(p): p for p in held if p.grad is not None}.values())
        tensors = [p.grad for p in parameters]
        if self.loss_scale != 1.0:
            torch._foreach_mul_(tensors, 1.0 / self.loss_scale)
        norms = torch.stack(torch._foreach_norm(tensors))
        return Gradients(active, parameters, tensors, norms, torch.linalg.vector_norm(norms))

    def check_finite(self, gradients: Gradients) -> StepVerdict:
        """Return whether all losses and gradients are finite on every rank; read the device, once.

        Raises:
            TrainingError: the first steps did not move any parameter, see ``ParameterUpdateMonitor``.
        """
        ok_here = (torch.isfinite(gradients.total_norm) & self._losses_finite).float()
        self._losses_finite = None
        scalars = [comm.all_reduce_min(ok_here), gradients.total_norm, *self._update_monitor.pending]
        all_ok, grad_norm, *change = torch.stack(scalars).tolist()
        self._update_monitor.check(*change)
        ok = bool(all_ok)
        self.verdict = StepVerdict(
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
            coefficient = self.clip(gradients.tensors, gradients.total_norm)
            self.verdict = dataclasses.replace(self.verdict, clip_coefficient=coefficient)

    def apply(self, gradients: Gradients) -> None:
        """Step every optimizer that has gradients, and drop them."""
        self._update_monitor.before_step()
        for optimizer in gradients.optimizers:
            optimizer.step()
        self._update_monitor.after_step(self.verdict.grad_norm)
        self.skipped_in_a_row = 0
        self._drop_gradients()

    def skip(self) -> None:
        """Leave the parameters as they are: restore the buffers, drop the gradients, count and log."""
        self.skipped_total += 1
        self.skipped_in_a_row += 1
        if self.buffers:
            self.buffers.restore()
        self._drop_gradients()
        logger.warning(
            "step skipped (%d in a row, %d in all): %s; loss scale %g",
            self.skipped_in_a_row,
            self.skipped_total,
            self._found(),
            self.verdict.loss_scale,
        )

    def update_scale(self, ok: bool) -> None:
        """Grow or shrink the loss scale, if there is one, after a step that was taken (``ok``) or skipped."""
        if self.scaler:
            self.scaler.update(ok)

    def check_skips(self) -> None:
        """Check that not too many steps in a row were skipped.

        Raises:
            PrecisionFailure: more than ``max_consecutive_skips``.
        """
        if self.skipped_in_a_row <= self.max_consecutive_skips:
            return
        at_floor = self.scaler is not None and self.scaler.scale <= self.scaler.min_scale
        cause = (
            "the loss scale is at its floor, SOLVER.AMP.MIN_SCALE: float16 cannot hold this model's values."
            if at_floor
            else "a loss or its gradient is infinite or NaN, whatever the loss scale."
            if self.scaler is None
            else "float16 overflows again and again."
        )
        fix = "a lower SOLVER.BASE_LR, SOLVER.CLIP_GRADIENTS, or a look at the data"
        if self.scaler is not None:
            fix = f"try SOLVER.AMP.DTYPE bfloat16, or SOLVER.AMP off; when that fails too, {fix}"
        headline = (
            f"{self.skipped_in_a_row} optimizer steps in a row were skipped, more than "
            f"SOLVER.AMP.MAX_CONSECUTIVE_SKIPS ({self.max_consecutive_skips}).\n"
            f"  found: {self._found()}; loss scale {self.verdict.loss_scale:g}"
        )
        raise PrecisionFailure(f"{headline}\n  cause: {cause}\n  fix:   {fix}", self.verdict, headline)

    def finish(self) -> StepVerdict:
        """Unscale, check and clip the gradients, step or skip, and update the loss scale.

        ``SimpleTrainer`` calls the parts instead, so a subclass overrides those.

        Returns:
            The verdict.

        Raises:
            TrainingError, PrecisionFailure: see the parts.
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

    def begin(self) -> None:
        """Do ``zero_grad``, under its old name."""
        warnings.warn("OptimizationStep.begin() is now zero_grad()", DeprecationWarning, stacklevel=2)
        self.zero_grad()

    def backward(self, losses: dict[str, torch.Tensor], share: float = 1.0) -> torch.Tensor:
        """Do ``scale(losses, weight).backward()``, under its old name; return the sum of the losses, detached."""
        warnings.warn("OptimizationStep.backward(x) is now scale(x).backward()", DeprecationWarning, stacklevel=2)
        self.scale(losses, share).backward()
        return self.total_loss

    def check_overrides(self) -> None:
        """Check that a subclass does not override a method that ``SimpleTrainer.run_step`` does not call.

        Raises:
            TrainingError: it overrides ``begin``, ``backward`` or ``finish``.
        """
        for old, new in _NOT_CALLED_IN_TRAINING.items():
            if getattr(type(self), old) is not getattr(OptimizationStep, old):
                raise TrainingError(
                    f"{type(self).__name__}.{old} would have no effect: the trainer no longer calls it.\n"
                    f"  fix: override {new} instead, or run_step of the trainer"
                )

    def disable_loss_scaling(self) -> None:
        """Disable loss scaling and reset the count of consecutive skips, after a change to another dtype."""
        self.scaler = None
        self.skipped_in_a_row = 0

    go_on_without_scaling = renamed_attribute("go_on_without_scaling", "disable_loss_scaling")

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the counts of skipped steps as plain values."""
        return {
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "skipped_total": self.skipped_total,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; a loss scale is taken over only where there is one on both sides."""
        self.skipped_total = state["skipped_total"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        elif self.scaler:
            logger.info("the checkpoint was trained without loss scaling: starting with scale %g", self.scaler.scale)
        elif state["scaler"]:
            logger.info("the checkpoint's loss scale (%g) is not needed here", state["scaler"]["scale"])

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # those that no optimizer holds would grow for ever

    def _in_order(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return an optimizer's parameters as ``groups_by_value`` orders them; sorted again only if they changed."""
        ids = [id(p) for p in _parameters(optimizer)]
        known, order = self._orders.get(id(optimizer), (None, []))
        if ids != known:
            order = [p for group in groups_by_value(optimizer, self._positions) for p in group]
            self._orders[id(optimizer)] = ids, order
        return order

    def _non_finite_names(self, gradients: Gradients) -> list[str]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        finite = torch.isfinite(gradients.norms).tolist()
        pairs = zip(gradients.parameters, finite, strict=True)
        return [names.get(id(p), "(not the model's)") for p, good in pairs if not good]

    def _found(self) -> str:
        """Return what was not finite in the last step."""
        bad = self.verdict.bad_parameters
        if bad:
            return f"{len(bad)} gradients are not finite, e.g. {', '.join(bad[:3])}"
        return "a loss or the total gradient norm is not finite"


_NOT_CALLED_IN_TRAINING = {
    "begin": "zero_grad",
    "backward": "scale",
    "finish": "unscale, check_finite, clip_gradients, apply, skip or update_scale",
}
"""Method of earlier versions -> methods that the trainer calls now."""


def groups_by_value(optimizer: Optimizer, positions: Mapping[int, int]) -> list[list[nn.Parameter]]:
    """Return an optimizer's parameters, grouped by equal learning rate and weight decay instead of by role.

    Checkpoints of earlier versions have their parameters in this order. Gradient norms are summed in it, so that
    their rounding, and with it clipping by the global norm, does not depend on the number of roles.

    Args:
        optimizer: groups without a ``role``, which other code has built, are returned as they are.
        positions: id of a parameter -> position in the model.
    """
    if not all("role" in group for group in optimizer.param_groups):
        return [group["params"] for group in optimizer.param_groups]
    held = [(p, (group["base_lr"], group["weight_decay"])) for group in optimizer.param_groups for p in group["params"]]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, values in sorted(held, key=lambda each: positions.get(id(each[0]), len(positions))):
        groups.setdefault(values, []).append(parameter)
    return list(groups.values())


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"]]
