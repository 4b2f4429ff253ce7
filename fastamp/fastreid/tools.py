"""FastReID's tools for scripts: environment, seeds, timer and precise batch norm."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.collect_env import get_pretty_env_info

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.evaluation.precise_bn import update_bn_statistics
from fastamp.utils.env import seed_all


def collect_env_info() -> str:
    """Describe Python, PyTorch, CUDA and the devices; ``fastamp doctor --env`` also checks mixed precision."""
    return get_pretty_env_info()


def seed_all_rng(seed: int | None = None) -> None:
    """Seed the global generators of Python, NumPy and PyTorch.

    Args:
        seed: the seed. Default None: a random seed.
    """
    seed_all(torch.seed() % 2**31 if seed is None else seed)


class Timer:
    """Stopwatch that can be paused; it starts when it is created."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restart from 0."""
        self._start, self._paused, self._excluded = time.perf_counter(), None, 0.0

    def pause(self) -> None:
        """Stop the watch.

        Raises:
            ValueError: if it is paused already.
        """
        if self._paused is not None:
            raise ValueError("the timer is paused already")
        self._paused = time.perf_counter()

    def is_paused(self) -> bool:
        """Return True if the watch is paused."""
        return self._paused is not None

    def resume(self) -> None:
        """Continue after ``pause``.

        Raises:
            ValueError: if it is not paused.
        """
        if self._paused is None:
            raise ValueError("the timer is not paused")
        self._excluded += time.perf_counter() - self._paused
        self._paused = None

    def seconds(self) -> float:
        """Return the time since the start, in seconds, without pauses."""
        end = time.perf_counter() if self._paused is None else self._paused
        return end - self._start - self._excluded


def get_bn_modules(model: nn.Module) -> list[nn.Module]:
    """Return the batch norm layers of ``model`` that are in training mode and have running statistics."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.training and layer.track_running_stats]


def update_bn_stats(model: nn.Module, data_loader: Iterable[Any], num_iters: int = 200) -> None:
    """Recompute the running statistics of batch norm in float32; see ``fastamp.evaluation.update_bn_statistics``."""
    device = next(model.parameters()).device
    update_bn_statistics(model, data_loader, num_iters, policy=PrecisionPolicy.float32(get_cfg(), device))
