"""Registry and builder of normalization layers."""

import torch
from torch import nn

from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

NORM_REGISTRY = Registry(
    "MODEL.BACKBONE.NORM / MODEL.HEADS.NORM",
    {
        "BN": nn.BatchNorm2d,
        # Spelled as in FastReID and as in PyTorch.
        "syncBN": nn.SyncBatchNorm,
        "SyncBN": nn.SyncBatchNorm,
        # FastReID does not split the batch, so that its GhostBN equals batch norm.
        "GhostBN": nn.BatchNorm2d,
    },
    modules=("fastamp.layers.frozen_norm",),
)

_GROUPS = 32


@NORM_REGISTRY.register("GN")
def group_norm(channels: int) -> nn.GroupNorm:
    """Build group normalization with 32 groups (Wu & He 2018, arXiv:1803.08494).

    Raises:
        ConfigError: if ``channels`` is not divisible by 32.
    """
    if channels % _GROUPS:
        raise ConfigError(
            f"norm GN requires a number of channels divisible by {_GROUPS}, got {channels}.\n  fix: use norm BN instead"
        )
    return nn.GroupNorm(_GROUPS, channels)


def build_norm(name: str, channels: int, *, freeze_bias: bool = False) -> nn.Module:
    """Build a normalization layer with weight 1 and bias 0.

    Args:
        name: a name in ``NORM_REGISTRY``.
        channels: number of input channels.
        freeze_bias: keep the bias at 0, as in BNNeck (Luo et al. 2019, arXiv:1903.07071). Default False.

    Raises:
        ConfigError: if the name is unknown.
    """
    norm = NORM_REGISTRY.get(name)(channels)
    if freeze_bias:
        norm.bias.requires_grad_(False)
    return norm


class IBN(nn.Module):
    """Instance norm for the first half of the channels, ``norm`` for the others (Pan et al. 2018, arXiv:1807.09441).

    Args:
        norm: a name in ``NORM_REGISTRY``.
        channels: number of input channels.
    """

    def __init__(self, norm: str, channels: int) -> None:
        super().__init__()
        self.instance_channels = channels // 2
        self.IN = nn.InstanceNorm2d(self.instance_channels, affine=True)
        self.BN = build_norm(norm, channels - self.instance_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a (B, C, H, W) tensor to a tensor of the same shape."""
        instance, batch = x.split([self.instance_channels, x.shape[1] - self.instance_channels], dim=1)
        return torch.cat((self.IN(instance), self.BN(batch)), dim=1)
