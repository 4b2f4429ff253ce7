"""The place of the first value that is not finite, and what to do about it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from fastamp.utils.moved import moved_names

__getattr__ = moved_names(__name__, {"Location": "fastamp.diagnostics.nan_location.NonFiniteLocation"})


@dataclass(frozen=True)
class NonFiniteLocation:
    """Where the first value that is not finite was made.

    Attributes:
        kind: ``"forward overflow"``, ``"backward overflow"``, ``"loss-scale overflow"`` (the gradients are finite under
            a smaller loss scale), ``"not finite in float32"`` (the precision is not to blame), ``"batch not finite"``.
        module: name of the module; ``""`` is the whole model.
        module_class: name of its class.
        part: what of it: ``"output"``, ``"gradient of its input"``, ``"gradient of <parameter>"``, or
            ``"between its parts, before <module>"``.
        dtype: of the value.
        inputs_finite: whether what the module was given, or the gradient that came to it, was finite.
        input_magnitude: the largest magnitude of its inputs.
        float32_magnitude: the largest magnitude of the same value in float32; None where it was not seen.
        parameter_magnitude: the largest magnitude of the module's own parameters; None when it has none.
        loss_scale: the loss scale of the pass.
        safe_scale: the largest power of two under which the gradients are finite; None but for a loss-scale overflow.
        neighbours: where it is between a module's parts, the last layer before it, and the one that came next.
        forced: modules that ``SOLVER.AMP.FORCE_FP32`` names already.
        position: how many values were looked at before it.
    """

    kind: str
    module: str
    module_class: str
    part: str
    dtype: str
    inputs_finite: bool
    input_magnitude: float
    float32_magnitude: float | None
    parameter_magnitude: float | None
    loss_scale: float
    safe_scale: float | None = None
    neighbours: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    position: int = 0

    @property
    def order(self) -> int:
        """Lower for what is nearer to the beginning: of the finds of several processes the lowest is the cause."""
        kinds = ("batch not finite", "not finite in float32", "forward overflow", "backward overflow")
        return (kinds.index(self.kind) if self.kind in kinds else len(kinds)) * 10**6 + self.position

    @property
    def name(self) -> str:
        """The module's name and class, e.g. ``"backbone.layer4.0.conv2 (Conv2d)"``."""
        return f"{self.module or 'the model itself'} ({self.module_class})"

    def describe(self) -> str:
        """Return what was found and what to do about it, in a few lines."""
        if self.kind == "batch not finite":
            return "batch not finite: what the model was given has infinite or NaN values already"
        lines = [f"{self.kind} in {self.name}: {self.part} is the first value that is not finite, {self.dtype}"]
        details = []
        if self.input_magnitude:
            state = "finite" if self.inputs_finite else "not finite"
            details.append(f"its inputs are {state}, up to {self.input_magnitude:.4g}")
        if self.float32_magnitude is not None and self.kind != "not finite in float32":
            details.append(f"in float32 the same value is up to {self.float32_magnitude:.4g}")
        limit = torch.finfo(getattr(torch, self.dtype)).max
        if self.parameter_magnitude is not None and self.parameter_magnitude > limit:
            details.append(f"its parameters are up to {self.parameter_magnitude:.4g}")
        if self.dtype != "float32":
            details.append(f"{self.dtype} ends at {limit:.4g}")
        if details:
            lines.append("  " + "; ".join(details))
        if self.kind in ("loss-scale overflow", "backward overflow"):
            lines.append(f"  under loss scale {self.loss_scale:g}")
        lines.append("  fix:   " + self.fix())
        return "\n".join(lines)

    def fix(self) -> str:
        """Return what to change."""
        if self.kind == "not finite in float32":
            return "look at the data, the loss and SOLVER.BASE_LR: mixed precision is not the cause"
        if self.kind == "loss-scale overflow":
            scale = f"{self.safe_scale:g}" if self.safe_scale else "of a smaller power of two"
            return (
                f"SOLVER.AMP.INIT_SCALE {scale} (MIN_SCALE no larger), or SOLVER.AMP.DTYPE bfloat16, which needs none"
            )
        # A function between two layers computes in float32 when what comes in does.
        names = [name for name in self.neighbours if name] if self.part.startswith("between") else [self.module]
        names = list(dict.fromkeys([*self.forced, *names])) if any(names) else []
        here = f'SOLVER.AMP.FORCE_FP32 "{names}"' if names else "compute that part in float32 (fastamp.amp.force_fp32)"
        others = "" if self.dtype == "bfloat16" else ", or SOLVER.AMP.DTYPE bfloat16"
        return f"{here}{others}; tools/amp_doctor.py finds all modules that need it"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)
