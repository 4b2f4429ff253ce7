"""MobileNetV2 of torchreid (Sandler et al. 2018, arXiv:1801.04381), which differs from torchvision's and FastReID's.

Its first block has an expansion convolution of factor 1, which the paper (table 2) and torchvision omit. Widths are
rounded down instead of to multiples of 8, and the last layer grows with the width.
"""

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.osnet import init_weights

WIDTHS = {"x1_0": 1.0, "x1_4": 1.4}
# Expansion, channels, number of blocks and stride of the stages (table 2 of the paper).
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvNormReLU6(nn.Module):
    """Convolution, normalization and ReLU6.

    Args:
        in_channels, out_channels: number of input and output channels.
        norm: name of the normalization layer.
        kernel_size: kernel size, odd; the padding is ``kernel_size // 2``. Default 1.
        stride, groups: of the convolution. Default 1.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, norm: str, kernel_size: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False
        )
        self.bn = build_norm(norm, out_channels)
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.bn(self.conv(x)))


class InvertedResidual(nn.Module):
    """Expansion, depthwise 3x3 convolution and linear projection, with a shortcut if the shape does not change.

    Args:
        in_channels, out_channels: number of input and output channels.
        expansion: ratio of the inner width to ``in_channels``.
        stride: stride of the depthwise convolution.
        norm: name of the normalization layer.
    """

    def __init__(self, in_channels: int, out_channels: int, *, expansion: int, stride: int, norm: str) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.conv1 = ConvNormReLU6(in_channels, inner, norm=norm)
        self.dwconv2 = ConvNormReLU6(inner, inner, norm=norm, kernel_size=3, stride=stride, groups=inner)
        self.conv3 = nn.Sequential(nn.Conv2d(inner, out_channels, 1, bias=False), build_norm(norm, out_channels))
        self.adds_input = stride == 1 and in_channels == out_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv3(self.dwconv2(self.conv1(x)))
        return x + out if self.adds_input else out


class TorchreidMobileNetV2(nn.Sequential, Backbone):
    """MobileNetV2 without global pooling and classifier, with torchreid's parameter names.

    Args:
        width: width multiplier.
        in_channels: number of image channels. Default 3.
        norm: name of the normalization layer. Default "BN".
    """

    def __init__(self, *, width: float, in_channels: int = 3, norm: str = "BN") -> None:
        super().__init__()
        channels = int(32 * width)
        self.add_module("conv1", ConvNormReLU6(in_channels, channels, norm=norm, kernel_size=3, stride=2))
        for number, (expansion, stage, count, stride) in enumerate(_STAGES, start=2):
            blocks = nn.Sequential()
            for step in (stride, *[1] * (count - 1)):
                out = int(stage * width)
                blocks.append(InvertedResidual(channels, out, expansion=expansion, stride=step, norm=norm))
                channels = out
            self.add_module(f"conv{number}", blocks)
        self.feature_dim = int(1280 * max(width, 1))
        self.add_module("conv9", ConvNormReLU6(channels, self.feature_dim, norm=norm))
        init_weights(self)


@BACKBONE_REGISTRY.register()
@variants(WIDTHS)
def build_torchreid_mobilenetv2_backbone(cfg: CfgNode) -> TorchreidMobileNetV2:
    """Build torchreid's MobileNetV2 configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or if ``PRETRAIN`` is True and ``PRETRAIN_PATH`` is empty.
        WeightsError: if the pretrained weights cannot be read or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    width = choose_depth(cfg, WIDTHS)
    model = TorchreidMobileNetV2(width=width, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM)
    return with_pretrained_weights(model, cfg, None)
