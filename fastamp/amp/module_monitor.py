"""Detection of child modules that do not train."""

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

logger = logging.getLogger(__name__)

FIRST_CHECK = 5
"""Number of applied steps before the first check."""

MOSTLY_ZERO = 0.5
"""Fraction of exactly zero gradient elements above which a module is reported."""

SMALLEST_UPDATE = 1e-10
"""Update-to-weight ratio (L2 norms) below which float32 rounding absorbs the updates."""

VISIBLE_UPDATE = 1e-6
"""Update-to-weight ratio above which the float32 sums of the parameters change within a period."""

SMALL_SCALE_STEPS = 200
"""Number of consecutive applied steps with a loss scale below ``SMALL_SCALE`` before the first warning."""

SMALL_SCALE = 128.0
"""Loss scale below which float16 gradients smaller than 5e-10 underflow. Trained networks have many of them."""


class ModuleMonitor:
    """Measure zero gradients and updates of each child module of a model, without an additional synchronization.

    The gradients of a single module may underflow to zero, e.g. those of a float16 backbone below a float32 head. The
    total gradient norm and the largest update over all parameters do not reveal this. Every ``period`` applied steps,
    the monitor therefore computes two values for each child module of the model: the fraction of gradient elements
    that are exactly zero, and the update-to-weight ratio. The values stay on the device until the host reads the
    verdict of the next step. A missing gradient counts as zero. Parameters with learning rate 0 are excluded, and so
    are modules with an attribute ``sparse_gradients = True``, such as the centers of a center loss.

    Args:
        model: model in training.
        optimizers: optimizers of the model.
        period: number of applied steps between two checks. Default 50.

    Attributes:
        pending: (3M,) float32 on the device, for the M modules of the last check: zero fractions, update-to-weight
            ratios, and 1 for modules with the same parameters as at the previous check (else 0). Cleared when ``check``
            receives the host values.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, period: int = 50) -> None:
        self.model = model
        self.optimizers = optimizers
        self.period = period
        self.pending: list[torch.Tensor] = []
        self._applied = 0
        self._small_scale_steps = 0
        self._names: list[str] = []
        self._before: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._zeros: list[torch.Tensor] = []
        self._same: list[torch.Tensor] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._reported: set[tuple[str, str]] = set()

    def set_period(self, period: int) -> None:
        """Set the number of applied steps between two checks."""
        self.period = period

    @torch.no_grad()
    def before_step(self, frozen: Iterable[str] = ()) -> None:
        """Measure the gradients and copy the parameters if a check is due at this step.

        Args:
            frozen: names of modules that are frozen on purpose (``MODEL.FREEZE_LAYERS``).
        """
        self._applied += 1
        if self._applied == 1:
            self._check_frozen(tuple(frozen))
        if self._applied != FIRST_CHECK and self._applied % self.period:
            return
        moving = {
            id(p) for opt in self.optimizers for group in opt.param_groups if group["lr"] for p in group["params"]
        }
        for name, module in _parts(self.model):
            parameters: list[torch.Tensor] = [
                p for p in _dense_parameters(module) if p.requires_grad and p.numel() and id(p) in moving
            ]
            if parameters:
                self._zeros.append(zeros := _zero_fraction(module, parameters))
                self._before[name] = parameters, [p.clone() for p in parameters]
                # Two numbers per parameter: softmax losses keep the sum of a classifier constant.
                sums = torch.stack([*(p.sum() for p in parameters), *torch._foreach_norm(parameters)])
                last = self._sums.get(name)
                if last is not None and last.shape == sums.shape:
                    self._same.append(last.eq(sums).all())
                else:
                    self._same.append(torch.zeros_like(zeros, dtype=torch.bool))
                self._sums[name] = sums

    @torch.no_grad()
    def after_step(self) -> None:
        """Measure the update-to-weight ratios if ``before_step`` started a check at this step."""
        if not self._before:
            return
        ratios = []
        for parameters, before in self._before.values():
            change = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(torch._foreach_sub(parameters, before))))
            size = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(before)))
            ratios.append(change / size.clamp_min(torch.finfo(size.dtype).tiny))
        self._names = list(self._before)
        self.pending = [torch.stack([tensor.float() for tensor in (*self._zeros, *ratios, *self._same)])]
        self._before, self._zeros, self._same = {}, [], []

    def check(self, values: Sequence[float], *, quiet: bool = False) -> None:
        """Warn about modules that do not train. The warning is repeated only if a module trained in the meantime.

        Args:
            values: values of ``pending``, copied to the host; empty if ``pending`` is empty.
            quiet: True if ``ParameterUpdateMonitor`` already warned that the first steps do not change the parameters;
                the first check then logs no warning. Default False.
        """
        if not values:
            return
        self.pending = []
        report = functools.partial(self._report, quiet=quiet and self._applied == FIRST_CHECK)
        count = len(self._names)
        columns = (values[start : start + count] for start in (0, count, 2 * count))
        for name, zeros, ratio, same in zip(self._names, *columns, strict=True):
            report(
                name,
                "zero gradients",
                zeros > MOSTLY_ZERO,
                f"{100 * zeros:.1f} % of the gradient elements of {name!r} are exactly zero: this part of the model "
                "hardly trains.\n"
                "  cause: gradients below 6e-8 divided by the loss scale underflow in float16, a hook or the loss sets "
                "them to zero, or the losses do not depend on this part.\n"
                "  fix:   set SOLVER.AMP.DTYPE to bfloat16, or increase SOLVER.AMP.INIT_SCALE; in float32, check the "
                "losses",
            )
            report(
                name,
                "reset",
                bool(same) and ratio >= VISIBLE_UPDATE,
                f"the parameters of {name!r} have the values of the previous check, at most {self.period} steps ago, "
                "although the optimizer updates them: they are reset between steps.\n"
                "  cause: custom code or a hook restores weights.\n"
                "  fix:   remove that code, or exclude these parameters from training (MODEL.FREEZE_LAYERS)",
            )
            report(
                name,
                "no update",
                ratio < SMALLEST_UPDATE and zeros <= MOSTLY_ZERO,
                f"the parameters of {name!r} do not change: update-to-weight ratio {ratio:.2g}.\n"
                "  cause: the learning rate is too small for float32.\n"
                "  fix:   increase SOLVER.BASE_LR, or set SOLVER.LR_FACTORS for this part",
            )

    def check_scale(self, scale: float | None) -> None:
        """Warn if the loss scale stays below ``SMALL_SCALE`` for ``SMALL_SCALE_STEPS`` applied steps.

        Args:
            scale: loss scale of the applied step; None without loss scaling.
        """
        small = scale is not None and scale < SMALL_SCALE
        self._small_scale_steps = self._small_scale_steps + 1 if small else 0
        if not small or self._small_scale_steps % SMALL_SCALE_STEPS == 0:
            self._report(
                "loss scale",
                "small",
                small,
                f"the loss scale is {scale}, and has been below {SMALL_SCALE:g} for {self._small_scale_steps} steps: "
                "gradients underflow in float16.\n"
                "  cause: repeated overflows reduced the loss scale, which grows only after "
                "SOLVER.AMP.GROWTH_INTERVAL consecutive finite steps.\n"
                "  fix:   reduce SOLVER.AMP.GROWTH_INTERVAL, or set SOLVER.AMP.DTYPE to bfloat16",
            )

    def _check_frozen(self, frozen: tuple[str, ...]) -> None:
        """Warn about top-level modules without a trainable parameter."""
        for name, module in _parts(self.model):
            parameters = list(module.parameters())
            on_purpose = any(name == frozen_name or frozen_name.startswith(f"{name}.") for frozen_name in frozen)
            if parameters and not on_purpose and not any(p.requires_grad for p in parameters):
                logger.warning(
                    "requires_grad is False for all %d parameters of %r, which MODEL.FREEZE_LAYERS does not list: "
                    "this part of the model does not train.\n"
                    "  fix: set requires_grad to True, or list the module in MODEL.FREEZE_LAYERS",
                    len(parameters),
                    name,
                )

    def _report(self, name: str, kind: str, occurs: bool, message: str, *, quiet: bool = False) -> None:
        """Log ``message`` if ``occurs`` is True and was False at the last check of this module and kind."""
        if not occurs:
            self._reported.discard((name, kind))
        elif (name, kind) not in self._reported:
            self._reported.add((name, kind))
            if not quiet:
                logger.warning("%s", message)


def _zero_fraction(module: nn.Module, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the fraction of gradient elements that are exactly zero, 0..1: () float32. A missing gradient is zero.

    Kernel positions of a convolution whose gradients are all zero are excluded if others are not: on a feature map as
    narrow as the kernel, they only ever see the padding.
    """
    kernels = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.modules.conv._ConvNd)}
    nonzero, total = torch.zeros(2, dtype=torch.float32, device=parameters[0].device)
    for parameter in parameters:
        if parameter.grad is None:
            total = total + parameter.numel()
            continue
        hits = parameter.grad != 0
        size: int | torch.Tensor = parameter.numel()
        if id(parameter) in kernels:
            live = hits.flatten(2).any(dim=1).any(dim=0).sum()
            positions = parameter[0, 0].numel()
            size = torch.where(live > 0, live, positions) * (size // positions)
        nonzero = nonzero + torch.count_nonzero(hits)
        total = total + size
    return 1 - nonzero / total


def _parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the names and modules of the model's children, or only the model itself if it has no children."""
    return list(model.named_children()) or [(type(model).__name__, model)]


@runtime_checkable
class SparseModule(Protocol):
    """Module whose gradients have few nonzero rows, if its attribute is True: those of the identities in a batch."""

    sparse_gradients: bool


def _dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    layers = [layer for layer in module.modules() if isinstance(layer, SparseModule) and layer.sparse_gradients]
    sparse = {id(p) for layer in layers for p in layer.parameters()}
    return [p for p in module.parameters() if id(p) not in sparse and (p.grad is None or not p.grad.is_sparse)]
