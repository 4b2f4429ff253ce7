"""Global pooling layers, computed in float32."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.utils.registry import Registry


class PoolLayer(Protocol):
    """Pooling layer, an ``nn.Module``: (B, C, H, W) -> (B, C x width_factor, 1, 1), or (B, D) for ``Flatten``.

    Attributes:
        width_factor: number of values for each channel. Default 1.
    """

    width_factor: int = 1


POOL_LAYER_REGISTRY = Registry("MODEL.HEADS.POOL_LAYER", contract=PoolLayer)


@POOL_LAYER_REGISTRY.register()
class Identity(nn.Module):
    """Identity layer, for backbones that return pooled (B, C, 1, 1) features."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@POOL_LAYER_REGISTRY.register()
class Flatten(nn.Module):
    """Flatten the feature map: (B, C, H, W) -> (B, C * H * W)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


@POOL_LAYER_REGISTRY.register("FastGlobalAvgPool")
@POOL_LAYER_REGISTRY.register()
class GlobalAvgPool(nn.Module):
    """Average pooling: (B, C, H, W) -> (B, C, 1, 1). Equivalent to FastReID's ``FastGlobalAvgPool``."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, 1)


@POOL_LAYER_REGISTRY.register()
class ClipGlobalAvgPool(nn.Module):
    """Average pooling clamped to 0..1: (B, C, H, W) -> (B, C, 1, 1)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, 1).clamp(0, 1)


@POOL_LAYER_REGISTRY.register()
class GlobalMaxPool(nn.Module):
    """Max pooling: (B, C, H, W) -> (B, C, 1, 1)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_max_pool2d(x, 1)


@POOL_LAYER_REGISTRY.register()
class GeneralizedMeanPooling(nn.Module):
    """Generalized-mean pooling, (mean of x^p)^(1/p) (Radenovic et al. 2018, arXiv:1711.02512, eq. 3).

    Maps (B, C, H, W) to (B, C, 1, 1). It is computed in float32, because the cube of an activation above 40.3
    overflows float16. Each feature map is divided by its maximum before pooling and multiplied by it afterwards, so
    that no exponent overflows or underflows.

    Args:
        p: exponent; 1 is average pooling, infinity max pooling. Default 3.0.
        eps: lower bound of the activations. Default 1e-6.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p: float | nn.Parameter = p
        self.eps = eps

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(min=self.eps)
        # The generalized mean is homogeneous: dividing by a constant does not change its gradients.
        largest = x.detach().amax((2, 3), keepdim=True)
        return largest * F.adaptive_avg_pool2d((x / largest).pow(self.p), 1).pow(1.0 / self.p)


@POOL_LAYER_REGISTRY.register()
class GeneralizedMeanPoolingP(GeneralizedMeanPooling):
    """Generalized-mean pooling with a learned exponent; ``p`` is a (1,) float32 parameter."""

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__(p, eps)
        self.p = nn.Parameter(torch.ones(1) * p)


@POOL_LAYER_REGISTRY.register()
class AdaptiveAvgMaxPool(nn.Module):
    """Sum of average and max pooling: (B, C, H, W) -> (B, C, 1, 1)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, 1)


@POOL_LAYER_REGISTRY.register()
class MaxAvgPool(nn.Module):
    """Max and average pooling side by side: (B, C, H, W) -> (B, 2 C, 1, 1), max first.

    As in the program of Gu et al. 2022, "Clothes-changing person re-identification with RGB modality only",
    arXiv:2204.06890.
    """

    width_factor = 2

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((F.adaptive_max_pool2d(x, 1), F.adaptive_avg_pool2d(x, 1)), dim=1)


def pooled_width(pool_layer: str, channels: int) -> int:
    """Return the number of values into which a pooling layer pools a feature map.

    Args:
        pool_layer: name in ``POOL_LAYER_REGISTRY``.
        channels: channels of the feature map; for ``Flatten`` channels x height x width.
    """
    return channels * POOL_LAYER_REGISTRY.get(pool_layer).width_factor
