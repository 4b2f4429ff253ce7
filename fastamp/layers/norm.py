"""Normalization layers by the name that a config gives them."""

from torch import nn

from fastamp.utils.registry import Registry

NORM_REGISTRY = Registry("MODEL.BACKBONE.NORM / MODEL.HEADS.NORM")
NORM_REGISTRY.register("BN")(nn.BatchNorm2d)


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
