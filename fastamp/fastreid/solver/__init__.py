"""Optimizers and learning-rate schedules, with FastReID's arguments."""

from fastamp.fastreid.solver.build import build_lr_scheduler, build_optimizer

__all__ = ["build_lr_scheduler", "build_optimizer"]
