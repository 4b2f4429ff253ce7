"""Precise batch norm."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.evaluation.precise_bn import update_bn_statistics

__all__ = ["get_bn_modules", "update_bn_stats"]


def get_bn_modules(model: nn.Module) -> list[nn.Module]:
    """Return the batch norm layers of ``model`` that are in training mode and have running statistics."""
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.training and layer.track_running_stats]


def update_bn_stats(model: nn.Module, data_loader: Iterable[Any], num_iters: int = 200) -> None:
    """Recompute the running statistics of batch norm in float32; see ``fastamp.evaluation.update_bn_statistics``."""
    device = next(model.parameters()).device
    update_bn_statistics(model, data_loader, num_iters, policy=PrecisionPolicy.float32(get_cfg(), device))
