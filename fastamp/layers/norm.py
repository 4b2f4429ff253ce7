"""Normalization layers by the name that a config gives them."""

import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

NORM_REGISTRY = Registry("MODEL.BACKBONE.NORM / MODEL.HEADS.NORM")
NORM_REGISTRY.register("BN")(nn.BatchNorm2d)
# FastReID's spelling and PyTorch's.
NORM_REGISTRY.register("syncBN")(nn.SyncBatchNorm)
NORM_REGISTRY.register("SyncBN")(nn.SyncBatchNorm)
# FastReID splits no batch for it, which leaves batch norm.
NORM_REGISTRY.register("GhostBN")(nn.BatchNorm2d)
# Statistics, weight and bias are buffers that stay as they are.
NORM_REGISTRY.register("FrozenBN")(FrozenBatchNorm2d)

_GROUPS = 32


@NORM_REGISTRY.register("GN")
def group_norm(channels: int) -> nn.GroupNorm:
    """Return a group normalization over 32 groups of channels (Wu & He 2018, arXiv:1803.08494).

    Raises:
        ConfigError: ``channels`` cannot be divided into them.
    """
    if channels % _GROUPS:
        raise ConfigError(f"the norm GN has {_GROUPS} groups of channels, into which {channels} cannot be divided")
    return nn.GroupNorm(_GROUPS, channels)


def build_norm(name: str, channels: int, *, freeze_bias: bool = False) -> nn.Module:
    """Return a normalization layer with weight 1 and bias 0.

    Args:
        name: a name in ``NORM_REGISTRY``.
        channels: of the (B, C, H, W) input.
        freeze_bias: keep the bias at 0 (the BNNeck of Luo et al. 2019, arXiv:1903.07071).

    Raises:
        ConfigError: nothing is registered under ``name``.
    """
    norm = NORM_REGISTRY.get(name)(channels)
    if freeze_bias:
        norm.bias.requires_grad_(False)
    return norm


class IBN(nn.Module):
    """Instance norm on the first half of the channels, ``norm`` on the others (Pan et al. 2018, arXiv:1807.09441).

    Args:
        norm: a name in ``NORM_REGISTRY``.
        channels: of the (B, C, H, W) input.
    """

    def __init__(self, norm: str, channels: int) -> None:
        super().__init__()
        self.instance_channels = channels // 2
        self.IN = nn.InstanceNorm2d(self.instance_channels, affine=True)
        self.BN = build_norm(norm, channels - self.instance_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) float to the same shape."""
        instance, batch = x.split([self.instance_channels, x.shape[1] - self.instance_channels], dim=1)
        return torch.cat((self.IN(instance), self.BN(batch)), dim=1)
