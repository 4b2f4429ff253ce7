"""FastReID's layers, and helpers for normalization layers and weight initialization."""

from typing import Any

import torch
from torch import nn
from torch.nn.init import trunc_normal_
from torch.nn.modules.utils import _pair as to_2tuple
from torchvision.models._utils import _make_divisible as make_divisible
from torchvision.ops import StochasticDepth, stochastic_depth

from fastamp.fastreid.layers import any_softmax
from fastamp.layers import norm as norms
from fastamp.layers.attention import NonLocal, SELayer
from fastamp.layers.frozen_norm import FrozenBatchNorm2d
from fastamp.layers.norm import build_norm
from fastamp.layers.pooling import (
    AdaptiveAvgMaxPool,
    ClipGlobalAvgPool,
    Flatten,
    GeneralizedMeanPooling,
    GeneralizedMeanPoolingP,
    GlobalAvgPool,
    GlobalMaxPool,
    Identity,
)

__all__ = [
    "GELU",
    "IBN",
    "AdaptiveAvgMaxPool",
    "ClipGlobalAvgPool",
    "DropPath",
    "FastGlobalAvgPool",
    "Flatten",
    "FrozenBatchNorm",
    "GeneralizedMeanPooling",
    "GeneralizedMeanPoolingP",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "Identity",
    "MemoryEfficientSwish",
    "Mish",
    "Non_local",
    "SELayer",
    "Swish",
    "SyncBatchNorm",
    "any_softmax",
    "drop_path",
    "get_norm",
    "make_divisible",
    "to_2tuple",
    "trunc_normal_",
    "weights_init_classifier",
    "weights_init_kaiming",
]

GELU, Mish, Swish, MemoryEfficientSwish = nn.GELU, nn.Mish, nn.SiLU, nn.SiLU
SyncBatchNorm, FrozenBatchNorm = nn.SyncBatchNorm, FrozenBatchNorm2d
FastGlobalAvgPool = GlobalAvgPool


def drop_path(x: torch.Tensor, drop_prob: float = 0.0, training: bool = False) -> torch.Tensor:
    """Set samples of ``x`` to zero with probability ``drop_prob``, and scale the others by 1 / (1 - drop_prob)."""
    return stochastic_depth(x, drop_prob, "row", training)


class DropPath(StochasticDepth):
    """Stochastic depth per sample (Huang et al. 2016, arXiv:1603.09382).

    Args:
        drop_prob: probability that a sample is set to zero. Default None: 0.
    """

    def __init__(self, drop_prob: float | None = None) -> None:
        super().__init__(drop_prob or 0.0, mode="row")


class IBN(norms.IBN):
    """Instance and batch norm with FastReID's arguments; see ``fastamp.layers.IBN``.

    Args:
        planes: number of input channels.
        bn_norm: name of the normalization layer.
        kwargs: ignored.
    """

    def __init__(self, planes: int, bn_norm: str, **kwargs: Any) -> None:
        super().__init__(bn_norm, planes)


class Non_local(NonLocal):
    """Non-local block with FastReID's arguments; see ``fastamp.layers.NonLocal``.

    Args:
        in_channels: number of input channels.
        bn_norm: name of the normalization layer.
        reduc_ratio: ignored, as in FastReID: the inner width is 1.
    """

    def __init__(self, in_channels: int, bn_norm: str, reduc_ratio: int = 2) -> None:
        super().__init__(in_channels, bn_norm)


def get_norm(norm: Any, out_channels: int, **kwargs: Any) -> nn.Module | None:
    """Build a normalization layer.

    Args:
        norm: name as in ``MODEL.BACKBONE.NORM``, or a function of the number of channels. ``""`` returns None.
        out_channels: number of channels.
        kwargs: ``bias_freeze`` and ``weight_freeze`` (bool) disable the gradient of the bias or weight;
            ``bias_init`` and ``weight_init`` (float) are the initial values. Default: False, False, 0 and 1.
    """
    if not norm:
        return None
    layer = build_norm(norm, out_channels) if isinstance(norm, str) else norm(out_channels)
    for name in ("weight", "bias"):
        parameter = getattr(layer, name, None)
        if parameter is None:
            continue
        if f"{name}_init" in kwargs:
            nn.init.constant_(parameter, kwargs[f"{name}_init"])
        if kwargs.get(f"{name}_freeze"):
            parameter.requires_grad_(False)
    return layer


def weights_init_kaiming(m: nn.Module) -> None:
    """Initialize a layer as FastReID does; for ``module.apply``.

    Linear layers: N(0, 0.01), bias 0. Convolutions: He normal by fan-out (He et al. 2015, arXiv:1502.01852), bias 0.
    Batch norm: weight 1, bias 0.
    """
    if isinstance(m, nn.modules.batchnorm._BatchNorm):
        if m.affine:
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)
    elif isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.01)
        else:
            nn.init.kaiming_normal_(m.weight, mode="fan_out")
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def weights_init_classifier(m: nn.Module) -> None:
    """Initialize a linear layer with N(0, 0.001) and bias 0; for ``module.apply``."""
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, std=0.001)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
