"""Location of the first non-finite value, with a suggested fix."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from fastamp.amp.policy import DTYPES


@dataclass(frozen=True)
class NonFiniteLocation:
    """Module and tensor in which the first non-finite value occurs, and its likely cause.

    Attributes:
        kind: ``"forward overflow"``, ``"backward overflow"``, ``"loss-scale overflow"`` (the gradients are finite with
            a smaller loss scale), ``"not finite in float32"`` (not caused by the precision), ``"batch not finite"``.
        module: name of the module; ``""`` is the whole model.
        module_class: name of the module's class.
        part: which value is not finite: ``"input"`` of the model, ``"output"`` of the module,
            ``"gradient of its input"``, ``"gradient of <parameter>"``, ``"between its submodules, before <module>"`` (a
            value computed there), or ``"between its submodules, gradient after <module>"``.
        dtype: dtype of the value.
        inputs_finite: True if the inputs of the module, or the incoming gradient, are finite.
        input_magnitude: largest absolute value of the module's inputs.
        float32_magnitude: largest absolute value of the same tensor in float32; None if not observed.
        parameter_magnitude: largest absolute value of the module's direct parameters; None if it has none.
        loss_scale: loss scale of the pass.
        safe_scale: largest power of two with finite gradients; only for a loss-scale overflow, else None.
        adjacent: for a value between submodules: names of the layer called before and the module called after the value
            is computed.
        forced: modules already in ``SOLVER.AMP.FORCE_FP32``.
        position: number of values that were checked before this one.
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
    adjacent: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    position: int = 0

    @property
    def order(self) -> int:
        """Sort key by order of computation: among several processes, the lowest location is the likely cause."""
        kinds = ("batch not finite", "not finite in float32", "forward overflow", "backward overflow")
        return (kinds.index(self.kind) if self.kind in kinds else len(kinds)) * 10**6 + self.position

    @property
    def name(self) -> str:
        """Name and class of the module, e.g. ``"backbone.layer4.0.conv2 (Conv2d)"``."""
        return f"{self.module or 'the model itself'} ({self.module_class})"

    def describe(self) -> str:
        """Format the location and the fix in a few lines."""
        if self.kind == "batch not finite":
            return "batch not finite: the input of the model contains Inf or NaN"
        kind = "NaN or Inf" if self.kind == "not finite in float32" else self.kind
        lines = [f"{kind} in {self.name}: first non-finite value: {self.part} ({self.dtype})"]
        details = []
        if self.input_magnitude:
            state = "finite" if self.inputs_finite else "not all finite"
            details.append(f"inputs {state}, largest {self.input_magnitude:.4g}")
        if self.float32_magnitude is not None and self.kind != "not finite in float32":
            details.append(f"same value in float32: largest {self.float32_magnitude:.4g}")
        limit = torch.finfo(DTYPES.get(self.dtype, torch.float64)).max
        if self.parameter_magnitude is not None and self.parameter_magnitude > limit:
            details.append(f"parameters: largest {self.parameter_magnitude:.4g}")
        if self.dtype != "float32":
            details.append(f"largest {self.dtype} number: {limit:.4g}")
        if details:
            lines.append("  found: " + "; ".join(details))
        if self.kind in ("loss-scale overflow", "backward overflow"):
            lines.append(f"  loss scale: {self.loss_scale:g}")
        lines.append("  fix:   " + self.fix())
        return "\n".join(lines)

    def fix(self) -> str:
        """Suggest a fix."""
        if self.kind == "not finite in float32":
            return "check the data, the loss and SOLVER.BASE_LR: mixed precision is not the cause"
        if self.kind == "loss-scale overflow":
            scale = f"{self.safe_scale:g}" if self.safe_scale else "a smaller power of two"
            return (
                f"set SOLVER.AMP.INIT_SCALE to {scale} (lower MIN_SCALE if necessary), SOLVER.AMP.DTYPE to bfloat16, "
                "which uses no loss scale"
            )
        # A function between two layers computes in float32 if its input is float32.
        names = [name for name in self.adjacent if name] if self.part.startswith("between") else [self.module]
        names = list(dict.fromkeys([*self.forced, *names])) if any(names) else []
        force = f'set SOLVER.AMP.FORCE_FP32 "{names}"' if names else "compute it in float32 with fastamp.amp.force_fp32"
        alternative = "" if self.dtype == "bfloat16" else ", or SOLVER.AMP.DTYPE bfloat16"
        return f"{force}{alternative}; run `fastamp doctor` to find all modules that need float32"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a crash dump."""
        return dataclasses.asdict(self)
