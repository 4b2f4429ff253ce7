"""Global pooling of a feature map to a vector; everything here is computed in float32."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.utils.registry import Registry

POOL_LAYER_REGISTRY = Registry("MODEL.HEADS.POOL_LAYER")


@POOL_LAYER_REGISTRY.register()
class Identity(nn.Module):
    """No pooling, for backbones that return (B, C, 1, 1) already."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@POOL_LAYER_REGISTRY.register()
class Flatten(nn.Module):
    """The map as one vector: (B, C, H, W) -> (B, C * H * W)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


@POOL_LAYER_REGISTRY.register("FastGlobalAvgPool")
@POOL_LAYER_REGISTRY.register()
class GlobalAvgPool(nn.Module):
    """Mean over the map: (B, C, H, W) -> (B, C, 1, 1); FastReID's faster form of it is the same function."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, 1)


@POOL_LAYER_REGISTRY.register()
class ClipGlobalAvgPool(nn.Module):
    """Mean over the map, cut off at 0 and 1: (B, C, H, W) -> (B, C, 1, 1)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, 1).clamp(0, 1)


@POOL_LAYER_REGISTRY.register()
class GlobalMaxPool(nn.Module):
    """Maximum over the map: (B, C, H, W) -> (B, C, 1, 1)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_max_pool2d(x, 1)


@POOL_LAYER_REGISTRY.register()
class GeneralizedMeanPooling(nn.Module):
    """Generalized mean over the map, (mean of x^p)^(1/p) (Radenovic et al. 2018, arXiv:1711.02512, eq. 3).

    In float16 the cube of an activation above 40.3 overflows, hence float32. Each map is divided by its largest value
    first and the mean multiplied by it, so that no exponent overflows or underflows.

    Args:
        p: exponent; 1 is the mean, infinity the maximum.
        eps: activations are at least this.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = p
        self.eps = eps

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(min=self.eps)
        # The generalized mean is homogeneous: its gradients are the same whatever constant the map is divided by.
        largest = x.detach().amax((2, 3), keepdim=True)
        return largest * F.adaptive_avg_pool2d((x / largest).pow(self.p), 1).pow(1.0 / self.p)


@POOL_LAYER_REGISTRY.register()
class GeneralizedMeanPoolingP(GeneralizedMeanPooling):
    """Generalized mean whose exponent is learned; ``p`` is a (1,) float32 parameter."""

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__(p, eps)
        self.p = nn.Parameter(torch.ones(1) * p)


@POOL_LAYER_REGISTRY.register()
class AdaptiveAvgMaxPool(nn.Module):
    """Mean plus maximum over the map: (B, C, H, W) -> (B, C, 1, 1)."""

    @force_fp32
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, 1)
