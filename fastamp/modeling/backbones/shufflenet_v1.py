"""ShuffleNet (Zhang et al. 2018, arXiv:1707.01083) with torchreid's parameter names."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.osnet import init_weights

# Number of groups -> channels of the three stages (table 1 of the paper).
CHANNELS = {
    "g1": (144, 288, 576),
    "g2": (200, 400, 800),
    "g3": (240, 480, 960),
    "g4": (272, 544, 1088),
    "g8": (384, 768, 1536),
}
_STEM = 24
_BLOCKS = (4, 8, 4)


class ShuffleUnit(nn.Module):
    """Grouped 1x1 convolution, channel shuffle, depthwise 3x3 convolution and grouped 1x1 convolution.

    With stride 1 the input is added; with stride 2 the averages of its 3x3 windows are concatenated before the output.

    Args:
        in_channels, out_channels: number of input and output channels, equal for stride 1.
        stride: 1 or 2.
        groups: number of groups of the last convolution, and of the shuffle.
        first_groups: number of groups of the first convolution.
        norm: name of the normalization layer.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, groups: int, first_groups: int, norm: str
    ) -> None:
        super().__init__()
        self.stride, self.groups = stride, groups
        inner, out = out_channels // 4, out_channels - in_channels * (stride == 2)
        self.conv1 = nn.Conv2d(in_channels, inner, 1, groups=first_groups, bias=False)
        self.bn1 = build_norm(norm, inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False)
        self.bn2 = build_norm(norm, inner)
        self.conv3 = nn.Conv2d(inner, out, 1, groups=groups, bias=False)
        self.bn3 = build_norm(norm, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x))).unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        out = self.bn3(self.conv3(self.bn2(self.conv2(out))))
        if self.stride == 1:
            return F.relu(x + out)
        return F.relu(torch.cat((F.avg_pool2d(x, 3, stride=2, padding=1), out), dim=1))


class ShuffleNet(nn.Sequential, Backbone):
    """ShuffleNet without global pooling and classifier.

    Args:
        channels: output channels of the three stages.
        groups: number of groups of the 1x1 convolutions; the first one of the network is not grouped.
        in_channels: number of image channels. Default 3.
        norm: name of the normalization layer. Default "BN".
    """

    def __init__(self, *, channels: tuple[int, int, int], groups: int, in_channels: int = 3, norm: str = "BN") -> None:
        super().__init__()
        stem = nn.Conv2d(in_channels, _STEM, 3, stride=2, padding=1, bias=False)
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.add_module("conv1", nn.Sequential(stem, build_norm(norm, _STEM), nn.ReLU(inplace=True), pool))
        width = _STEM
        for number, (stage, count) in enumerate(zip(channels, _BLOCKS, strict=True), start=2):
            blocks = nn.Sequential()
            for stride in (2, *[1] * (count - 1)):
                first = 1 if width == _STEM else groups
                blocks.append(ShuffleUnit(width, stage, stride=stride, groups=groups, first_groups=first, norm=norm))
                width = stage
            self.add_module(f"stage{number}", blocks)
        self.feature_dim = width
        init_weights(self)


@BACKBONE_REGISTRY.register()
@variants(CHANNELS)
def build_shufflenet_backbone(cfg: CfgNode) -> ShuffleNet:
    """Build the ShuffleNet configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or if ``PRETRAIN`` is True and ``PRETRAIN_PATH`` is empty.
        WeightsError: if the pretrained weights cannot be read or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    channels, groups = choose_depth(cfg, CHANNELS), int(backbone.DEPTH.removeprefix("g"))
    model = ShuffleNet(channels=channels, groups=groups, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM)
    return with_pretrained_weights(model, cfg, None)
