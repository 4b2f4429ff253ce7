"""Experiment trackers, each in its own process, so that a failing or slow service does not affect training."""

from fastamp.utils.trackers.base import LOGGER_REGISTRY, TrackedRun, Tracker
from fastamp.utils.trackers.clearml import ClearML
from fastamp.utils.trackers.mlflow import MLflow
from fastamp.utils.trackers.wandb import WandB

__all__ = ["LOGGER_REGISTRY", "ClearML", "MLflow", "TrackedRun", "Tracker", "WandB"]
