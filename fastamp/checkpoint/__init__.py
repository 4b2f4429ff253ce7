"""Checkpoints: safe reading and writing, conversion of state dicts, pretrained weights."""

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint

__all__ = ["Checkpointer", "load_model_state", "read_checkpoint"]
