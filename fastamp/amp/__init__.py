"""Mixed precision: one policy, float32 regions, and the step that judges its own gradients."""

from fastamp.amp.fp32 import apply_force_fp32, force_fp32, to_float32
from fastamp.amp.policy import PrecisionPolicy, resolve_device
from fastamp.amp.precautions import Precautions
from fastamp.amp.step import LossScaler, OptimizationStep, PrecisionFailure, StepVerdict

__all__ = [
    "LossScaler",
    "OptimizationStep",
    "Precautions",
    "PrecisionFailure",
    "PrecisionPolicy",
    "StepVerdict",
    "apply_force_fp32",
    "force_fp32",
    "resolve_device",
    "to_float32",
]
