"""Optimizers with their parameter groups, gradient clipping, and the learning-rate schedule."""

from fastamp.solver.build import build_gradient_clipping, build_lr_schedule, build_optimizer
from fastamp.solver.lr_schedule import LearningRateSchedule
from fastamp.solver.state import OptimizerState

__all__ = ["LearningRateSchedule", "OptimizerState", "build_gradient_clipping", "build_lr_schedule", "build_optimizer"]
