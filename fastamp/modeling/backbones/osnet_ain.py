"""OSNet-AIN (Zhou et al. 2021, arXiv:1910.06827) with torchreid's parameter names.

The positions of the instance norms were found by an architecture search.
"""

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.osnet import (
    CHANNELS,
    ChannelGate,
    ConvNorm,
    LightConv3x3,
    init_weights,
    shortcut,
    torchreid_weights,
    transition,
)

PRETRAINED = {
    "x1_0": torchreid_weights("osnet_ain_x1_0", "1-CaioD9NaqbHK_kzSMW8VE4_3KcsRjEo"),
    "x0_75": torchreid_weights("osnet_ain_x0_75", "1apy0hpsMypqstfencdH-jKIUEFOW4xoM"),
    "x0_5": torchreid_weights("osnet_ain_x0_5", "1KusKvEYyKGDTUBVRxRiz55G31wkihB6l"),
    "x0_25": torchreid_weights("osnet_ain_x0_25", "1SxQt2AvmEcgWNhaRb2xC4rP6ZwVDP0Wt"),
}


class Stream(nn.Module):
    """Sequence of ``count`` light 3x3 convolutions."""

    def __init__(self, channels: int, count: int, norm: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LightConv3x3(channels, norm) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class AINBlock(nn.Module):
    """OSNet block with optional instance norm before the residual addition (OSNet-IBN: after the addition).

    Args:
        in_channels, out_channels: number of input and output channels.
        norm: name of the normalization layer.
        instance_norm: replace the normalization of the last convolution with instance norm.
    """

    def __init__(self, in_channels: int, out_channels: int, *, norm: str, instance_norm: bool) -> None:
        super().__init__()
        channels = out_channels // 4
        self.conv1 = ConvNorm(in_channels, channels, norm=build_norm(norm, channels))
        self.conv2 = nn.ModuleList(Stream(channels, count, norm) for count in range(1, 5))
        self.gate = ChannelGate(channels)
        last_norm = nn.Identity() if instance_norm else build_norm(norm, out_channels)
        self.conv3 = ConvNorm(channels, out_channels, norm=last_norm, linear=True)
        self.IN = nn.InstanceNorm2d(out_channels, affine=True) if instance_norm else nn.Identity()
        self.downsample = shortcut(in_channels, out_channels, norm)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduced = self.conv1(x)
        out = self.conv3(self.gate(*(stream(reduced) for stream in self.conv2)))
        return self.relu(self.IN(out) + self.downsample(x))


class OSNetAIN(nn.Module, Backbone):
    """OSNet-AIN without global pooling and classifier.

    The network has a stem with instance norm, three stages of two blocks, and a 1x1 convolution.

    Args:
        channels: output channels of the stem and of the three stages.
        in_channels: number of image channels.
        norm: name of the normalization layer for positions without instance norm.
    """

    def __init__(self, *, channels: tuple[int, int, int, int], in_channels: int = 3, norm: str = "BN") -> None:
        super().__init__()
        stem, first, second, third = channels
        self.conv1 = ConvNorm(in_channels, stem, norm=nn.InstanceNorm2d(stem, affine=True), kernel_size=7, stride=2)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.conv2 = _stage(stem, first, norm, instance_norms=(True, True))
        self.pool2 = transition(first, norm)
        self.conv3 = _stage(first, second, norm, instance_norms=(False, True))
        self.pool3 = transition(second, norm)
        self.conv4 = _stage(second, third, norm, instance_norms=(True, False))
        self.conv5 = ConvNorm(third, third, norm=build_norm(norm, third))
        self.feature_dim = third
        init_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W), float, to (B, feature_dim, ~H/16, ~W/16)."""
        x = self.maxpool(self.conv1(x))
        x = self.pool3(self.conv3(self.pool2(self.conv2(x))))
        return self.conv5(self.conv4(x))


def _stage(in_channels: int, out_channels: int, norm: str, instance_norms: tuple[bool, bool]) -> nn.Sequential:
    first, second = instance_norms
    return nn.Sequential(
        AINBlock(in_channels, out_channels, norm=norm, instance_norm=first),
        AINBlock(out_channels, out_channels, norm=norm, instance_norm=second),
    )


@BACKBONE_REGISTRY.register()
@variants(CHANNELS)
def build_osnet_ain_backbone(cfg: CfgNode) -> OSNetAIN:
    """Build the OSNet-AIN configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    channels = choose_depth(cfg, CHANNELS)
    model = OSNetAIN(channels=channels, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM)
    return with_pretrained_weights(model, cfg, PRETRAINED[backbone.DEPTH])
