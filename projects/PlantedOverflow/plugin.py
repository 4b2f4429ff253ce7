"""Small backbone for comparing precisions on a CPU, with an optional layer whose output overflows float16."""

import torch
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.modeling import BACKBONE_REGISTRY

KEYS = (
    Key(
        "MODEL.BACKBONE.PLANTED",
        1.0,
        "Factor on the output of the second convolution; the batch norm after it removes the factor.",
    ),
)


class Times(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@BACKBONE_REGISTRY.register()
def build_small_backbone(cfg: CfgNode) -> nn.Module:
    """Build a backbone (B, C, H, W) -> (B, FEAT_DIM, H/8, W/8) of two convolutions.

    The backbone is small because a CPU emulates float16 convolutions slowly.
    """
    width = cfg.MODEL.BACKBONE.FEAT_DIM
    return nn.Sequential(
        nn.Conv2d(cfg.INPUT.CHANNELS, 32, 5, stride=4, padding=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, width, 3, stride=2, padding=1, bias=False),
        Times(cfg.MODEL.BACKBONE.PLANTED),  # the batch norm removes the factor
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )
