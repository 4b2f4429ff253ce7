"""Mixed precision: precision policy, float32 regions, loss scaling and the optimizer step."""

from fastamp.amp.fp32 import apply_force_fp32, force_fp32, to_float32
from fastamp.amp.policy import PrecisionPolicy, requested_device, resolve_device
from fastamp.amp.step import LossScaler, OptimizationStep, PrecisionFailure, StepVerdict

__all__ = [
    "LossScaler",
    "OptimizationStep",
    "PrecisionFailure",
    "PrecisionPolicy",
    "StepVerdict",
    "apply_force_fp32",
    "force_fp32",
    "requested_device",
    "resolve_device",
    "to_float32",
]
