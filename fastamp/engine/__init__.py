"""Training loop, hooks, default trainer and launcher."""

from fastamp.engine import hooks
from fastamp.engine.defaults import DefaultTrainer
from fastamp.engine.hooks import HookBase, Priority
from fastamp.engine.launch import launch
from fastamp.engine.run_state import ConfigText
from fastamp.engine.setup import default_setup
from fastamp.engine.stages import Stage
from fastamp.engine.train_loop import TRAINER_REGISTRY, AMPTrainer, SimpleTrainer
from fastamp.engine.trainer_base import TrainerBase
from fastamp.utils.arguments import default_argument_parser
from fastamp.utils.command_line import run_command_line

__all__ = [
    "TRAINER_REGISTRY",
    "AMPTrainer",
    "ConfigText",
    "DefaultTrainer",
    "HookBase",
    "Priority",
    "SimpleTrainer",
    "Stage",
    "TrainerBase",
    "default_argument_parser",
    "default_setup",
    "hooks",
    "launch",
    "run_command_line",
]
