"""The optimizer step: backward, loss scaling, the verdict on its gradients, clipping, step or skip."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.amp.buffers import ForwardBuffers
from fastamp.amp.health import FirstSteps, check_losses, explain_no_gradient, zero_share
from fastamp.amp.policy import PrecisionPolicy
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError

logger = logging.getLogger(__name__)

TINY_GRAD_NORM = 1e-3
"""Below this gradients may have been rounded to zero: it is looked at how many of them are."""

Clip = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]


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
        zero_share: (), the share of the gradients' elements that are exactly zero, where the norm is below
            ``TINY_GRAD_NORM``; else None.
    """

    ok: bool
    grad_norm: float
    loss_scale: float
    clip_coefficient: torch.Tensor | None = None
    bad_parameters: list[str] = field(default_factory=list)
    zero_share: torch.Tensor | None = None


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


class OptimizationStep:
    """Run the backward passes of one step and then take it or skip it, as a whole, on all ranks alike.

    The order is: scale, backward, unscale, verdict, clip, step. The verdict is the finiteness of losses and
    of the unscaled gradient norm: not a change of the scale, which a growing scale fakes and a static one never
    shows. All optimizers step or none does. The host reads the device once a step, for the verdict.

    Args:
        model: names the parameters in messages.
        optimizers: those whose parameters have a gradient take part in a step; the others are left out of it.
        scaler: the loss scale of float16; None for bfloat16 and float32.
        clip: ``clip(gradients, total_norm) -> coefficient``, applied in place to unscaled gradients.
        max_consecutive_skips: more skipped steps in a row than this end the training.
        guard_buffers: ``begin`` keeps what forward passes write, see ``ForwardBuffers``, and a step that is skipped
            gives it back.
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
        self.clip = clip
        self.max_consecutive_skips = max_consecutive_skips
        self.skipped_total = 0
        self.skipped_in_a_row = 0
        self.frozen: Sequence[str] = ()
        """Modules that are frozen on purpose: while there are any, some losses may reach no parameter, but not all."""
        self._losses_finite: torch.Tensor | None = None
        self._positions = {id(p): number for number, p in enumerate(model.parameters())}
        self._orders: dict[int, tuple[list[int], list[nn.Parameter]]] = {}
        self._first_steps = FirstSteps(self.optimizers)

    def begin(self) -> None:
        """Be called before the forward passes of each step; gradients that something else left behind are dropped."""
        self.model.zero_grad(set_to_none=True)
        if self.buffers:
            self.buffers.keep()

    def backward(self, losses: dict[str, torch.Tensor], share: float = 1.0) -> torch.Tensor:
        """Add the gradients of one micro-batch.

        Args:
            losses: loss name -> (), float32, as the model returned them.
            share: this micro-batch's share of the step, 1/k under accumulation over k.

        Returns:
            (), the sum of the losses, detached.

        Raises:
            TrainingError: no loss, a loss that is no float32 scalar, or one that no parameter reaches.
        """
        check_losses(losses, frozen=self.frozen, model=None if self._first_steps.over else self.model)
        total = torch.stack(list(losses.values())).sum()
        finite = torch.isfinite(total.detach())
        self._losses_finite = finite if self._losses_finite is None else self._losses_finite & finite
        scale = self.scaler.scale if self.scaler else 1.0
        (total * (share * scale)).backward()
        return total.detach()

    def finish(self) -> StepVerdict:
        """Unscale, judge, and step or skip; gradients are gone afterwards.

        Raises:
            TrainingError: no optimizer has a gradient at all.
            PrecisionFailure: too many steps in a row were skipped.
        """
        if self._losses_finite is None:
            raise RuntimeError("finish() without a backward() before it")
        active = [opt for opt in self.optimizers if any(p.grad is not None for p in _parameters(opt))]
        if not active:
            raise TrainingError(explain_no_gradient(self.model, self.optimizers))
        held = [p for opt in active for p in self._in_order(opt)]
        # One that two optimizers hold is still unscaled once.
        parameters = list({id(p): p for p in held if p.grad is not None}.values())
        gradients = [p.grad for p in parameters]
        scale = self.scaler.scale if self.scaler else 1.0
        with torch.no_grad():
            if scale != 1.0:
                torch._foreach_mul_(gradients, 1.0 / scale)
            norms = torch.stack(torch._foreach_norm(gradients))
            total_norm = torch.linalg.vector_norm(norms)
            ok_here = (torch.isfinite(total_norm) & self._losses_finite).float()
            flags = [comm.all_reduce_min(ok_here), total_norm]
            if self._first_steps.pending is not None:
                flags.append(self._first_steps.pending)
            ok_flag, grad_norm, *change = torch.stack(flags).tolist()
        if change:
            self._first_steps.judge(change[0])
        ok = bool(ok_flag)
        self._losses_finite = None
        coefficient = None
        zeros = None
        bad_parameters: list[str] = []
        if ok:
            if grad_norm < TINY_GRAD_NORM:
                zeros = zero_share(gradients)
            coefficient = self.clip(gradients, total_norm) if self.clip else None
            self._first_steps.keep()
            for optimizer in active:
                optimizer.step()
            self._first_steps.compare(grad_norm)
            self.skipped_in_a_row = 0
        else:
            self.skipped_total += 1
            self.skipped_in_a_row += 1
            if self.buffers:
                self.buffers.restore()
            bad_parameters = self._non_finite_names(parameters, norms)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # those that no optimizer holds would grow for ever
        if self.scaler:
            self.scaler.update(ok)
        verdict = StepVerdict(ok, grad_norm, scale, coefficient, bad_parameters, zeros)
        if not ok:
            self._report_skip(verdict)
        return verdict

    def go_on_without_scaling(self) -> None:
        """Leave loss scaling off and count skipped steps in a row anew, after a change to another dtype."""
        self.scaler = None
        self.skipped_in_a_row = 0

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

    def _in_order(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return an optimizer's parameters as ``groups_by_value`` orders them; sorted again only if they changed."""
        ids = [id(p) for p in _parameters(optimizer)]
        known, order = self._orders.get(id(optimizer), (None, []))
        if ids != known:
            order = [p for group in groups_by_value(optimizer, self._positions) for p in group]
            self._orders[id(optimizer)] = ids, order
        return order

    def _non_finite_names(self, parameters: list[nn.Parameter], norms: torch.Tensor) -> list[str]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        finite = torch.isfinite(norms).tolist()
        return [names.get(id(p), "(not the model's)") for p, good in zip(parameters, finite, strict=True) if not good]

    def _report_skip(self, verdict: StepVerdict) -> None:
        bad = verdict.bad_parameters
        found = "a loss or the total gradient norm is not finite"
        if bad:
            found = f"{len(bad)} gradients are not finite, e.g. {', '.join(bad[:3])}"
        logger.warning(
            "step skipped (%d in a row, %d in all): %s; loss scale %g",
            self.skipped_in_a_row,
            self.skipped_total,
            found,
            verdict.loss_scale,
        )
        if self.skipped_in_a_row > self.max_consecutive_skips:
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
                f"  found: {found}; loss scale {verdict.loss_scale:g}"
            )
            raise PrecisionFailure(f"{headline}\n  cause: {cause}\n  fix:   {fix}", verdict, headline)


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
