"""Blocks shared by EfficientNet and RegNet, with the parameter names of pycls."""

import torch
from torch import nn

from fastamp.layers import build_norm

PYCLS = "https://dl.fbaipublicfiles.com/pycls/dds_baselines/"


class Stem(nn.Module):
    """3x3 convolution with stride 2, normalization and activation function."""

    def __init__(self, in_channels: int, channels: int, norm: str, activation: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.bn = build_norm(norm, channels)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.bn(self.conv(x)))


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation: channel gates from global average pooling (Hu et al. 2018, arXiv:1709.01507).

    Args:
        channels: number of input channels.
        squeezed: number of hidden channels.
        activation: activation of the hidden channels.
    """

    def __init__(self, channels: int, squeezed: int, activation: nn.Module) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.f_ex = nn.Sequential(
            nn.Conv2d(channels, squeezed, 1), activation, nn.Conv2d(squeezed, channels, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a (B, C, H, W) tensor to a tensor of the same shape."""
        return x * self.f_ex(self.avg_pool(x))
