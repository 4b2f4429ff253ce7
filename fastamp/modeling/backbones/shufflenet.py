"""ShuffleNetV2 (Ma et al. 2018, arXiv:1807.11164) with the parameter names of its authors and FastReID.

The network follows the authors' implementation and is not equivalent to torchvision's. torchvision shuffles the
channels after a block; this network shuffles them before a block, in a different order. In blocks of stride 2,
torchvision's shortcut branch outputs half of the output channels; here it outputs as many channels as the input has.
"""

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights

# Channels of the three stages and of the last convolution.
CHANNELS = {
    "0.5x": (48, 96, 192, 1024),
    "1.0x": (116, 232, 464, 1024),
    "1.5x": (176, 352, 704, 1024),
    "2.0x": (244, 488, 976, 2048),
}
_STEM = 24
_BLOCKS = (4, 8, 4)


class ShuffleBlock(nn.Module):
    """Split the channels, apply 1x1, depthwise 3x3 and 1x1 convolutions to one half, and concatenate both halves.

    With stride 2 the channels are not split: both branches process all channels, and the shortcut branch has a
    depthwise and a 1x1 convolution.

    Args:
        in_channels: number of input channels, even.
        out_channels: number of output channels.
        stride: 1 (``in_channels`` must equal ``out_channels``) or 2.
        norm: name of the normalization layer.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.splits = stride == 1
        main_channels, middle = in_channels // 2 if self.splits else in_channels, out_channels // 2
        self.branch_main = nn.Sequential(
            *_pointwise(main_channels, middle, norm),
            *_depthwise(middle, stride, norm),
            *_pointwise(middle, out_channels - main_channels, norm),
        )
        self.branch_proj: nn.Module = nn.Identity()
        if not self.splits:
            self.branch_proj = nn.Sequential(
                *_depthwise(in_channels, stride, norm), *_pointwise(in_channels, in_channels, norm)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Taking every second channel shuffles: each branch gets half of the channels of both previous branches.
        passing, main = (x[:, ::2], x[:, 1::2]) if self.splits else (x, x)
        return torch.cat((self.branch_proj(passing), self.branch_main(main)), dim=1)


def _pointwise(in_channels: int, out_channels: int, norm: str) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        build_norm(norm, out_channels),
        nn.ReLU(inplace=True),
    )


def _depthwise(channels: int, stride: int, norm: str) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
    return convolution, build_norm(norm, channels)


class ShuffleNetV2(nn.Module, Backbone):
    """ShuffleNetV2 without global pooling and classifier.

    Args:
        channels: output channels of the three stages and of the last convolution.
        in_channels: number of image channels.
        norm: name of the normalization layer.
    """

    def __init__(self, *, channels: tuple[int, int, int, int], in_channels: int = 3, norm: str = "BN") -> None:
        super().__init__()
        self.first_conv = nn.Sequential(
            nn.Conv2d(in_channels, _STEM, 3, stride=2, padding=1, bias=False),
            build_norm(norm, _STEM),
            nn.ReLU(inplace=True),
        )
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        *stages, self.feature_dim = channels
        blocks, width = [], _STEM
        for stage, count in zip(stages, _BLOCKS, strict=True):
            blocks.append(ShuffleBlock(width, stage, stride=2, norm=norm))
            blocks += [ShuffleBlock(stage, stage, stride=1, norm=norm) for _ in range(count - 1)]
            width = stage
        self.features = nn.Sequential(*blocks)
        self.conv_last = nn.Sequential(*_pointwise(width, self.feature_dim, norm))
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialize convolutions as the authors do: std 1 / (input channels per group), or 0.01 for the first one."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, 1 / module.weight.shape[1])
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.bias, 0.0001)
        nn.init.normal_(self.first_conv[0].weight, 0, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W), float, to (B, feature_dim, ~H/32, ~W/32)."""
        return self.conv_last(self.features(self.maxpool(self.first_conv(x))))


@BACKBONE_REGISTRY.register()
@variants(CHANNELS)
def build_shufflenetv2_backbone(cfg: CfgNode) -> ShuffleNetV2:
    """Build the ShuffleNetV2 configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or if ``PRETRAIN`` is True and ``PRETRAIN_PATH`` is empty.
        WeightsError: if the pretrained weights cannot be read or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    channels = choose_depth(cfg, CHANNELS)
    model = ShuffleNetV2(channels=channels, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM)
    return with_pretrained_weights(model, cfg, None)
