"""A small backbone for comparing precisions on a CPU, with a layer that float16 cannot hold where one is asked for."""

import torch
from torch import nn

from fastamp.modeling import BACKBONE_REGISTRY


def add_config(cfg):
    """Define the key of this project."""
    cfg.define("MODEL.BACKBONE.PLANTED", 1.0, "Factor on what the second convolution returns; the norm takes it away.")


class Times(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@BACKBONE_REGISTRY.register()
def build_small_backbone(cfg) -> nn.Module:
    """Return (B, C, H, W) -> (B, FEAT_DIM, H/8, W/8): two convolutions, since a CPU emulates float16's slowly."""
    width = cfg.MODEL.BACKBONE.FEAT_DIM
    return nn.Sequential(
        nn.Conv2d(cfg.INPUT.CHANNELS, 32, 5, stride=4, padding=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, width, 3, stride=2, padding=1, bias=False),
        Times(cfg.MODEL.BACKBONE.PLANTED),  # a norm follows: the network computes the same with any factor
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )
