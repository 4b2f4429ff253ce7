"""Training hooks."""

from fastamp.engine.hooks.activations import ActivationMonitor
from fastamp.engine.hooks.averaging import EMA, SWA
from fastamp.engine.hooks.base import HookBase, Priority
from fastamp.engine.hooks.checkpoint import PeriodicCheckpointer
from fastamp.engine.hooks.compilation import CompilationMonitor
from fastamp.engine.hooks.epoch import SetEpoch
from fastamp.engine.hooks.evaluation import BestMetric, EvalHook
from fastamp.engine.hooks.freeze import FreezeClassifier, FreezeLayers
from fastamp.engine.hooks.learning_rate import LRScheduler
from fastamp.engine.hooks.report import ReportHook
from fastamp.engine.hooks.signals import StopOnSignal
from fastamp.engine.hooks.speed import Profile, SpeedMonitor
from fastamp.engine.hooks.writer import PeriodicWriter, console_line

__all__ = [
    "EMA",
    "SWA",
    "ActivationMonitor",
    "BestMetric",
    "CompilationMonitor",
    "EvalHook",
    "FreezeClassifier",
    "FreezeLayers",
    "HookBase",
    "LRScheduler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "Priority",
    "Profile",
    "ReportHook",
    "SetEpoch",
    "SpeedMonitor",
    "StopOnSignal",
    "console_line",
]
