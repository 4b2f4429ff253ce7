"""Optimizers and parameter groups, gradient clipping, learning-rate schedules and weight averages."""

from fastamp.solver.build import build_gradient_clipping, build_optimizer, build_optimizers, build_own_optimizers
from fastamp.solver.lr_schedule import LearningRateSchedule, build_lr_schedule, swa_start, warmup_length
from fastamp.solver.state import OptimizerState
from fastamp.solver.weight_average import WeightAverage

__all__ = [
    "LearningRateSchedule",
    "OptimizerState",
    "WeightAverage",
    "build_gradient_clipping",
    "build_lr_schedule",
    "build_optimizer",
    "build_optimizers",
    "build_own_optimizers",
    "swa_start",
    "warmup_length",
]
