"""FastReID's training loops, hooks, default trainer and launcher."""

from fastamp.fastreid.engine import hooks
from fastamp.fastreid.engine.defaults import DefaultPredictor, DefaultTrainer, default_argument_parser, default_setup
from fastamp.fastreid.engine.hooks import (
    CallbackHook,
    EvalHook,
    IterationTimer,
    LayerFreeze,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
    PreciseBN,
)
from fastamp.fastreid.engine.launch import launch
from fastamp.fastreid.engine.train_loop import AMPTrainer, HookBase, SimpleTrainer, TrainerBase

__all__ = [
    "AMPTrainer",
    "CallbackHook",
    "DefaultPredictor",
    "DefaultTrainer",
    "EvalHook",
    "HookBase",
    "IterationTimer",
    "LRScheduler",
    "LayerFreeze",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
    "SimpleTrainer",
    "TrainerBase",
    "default_argument_parser",
    "default_setup",
    "hooks",
    "launch",
]
