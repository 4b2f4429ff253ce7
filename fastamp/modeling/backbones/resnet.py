"""ResNet (He et al. 2016, arXiv:1512.03385) with torchvision's parameter names, for person-shaped images."""

import math
from typing import Any

import torch
from torch import nn

from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY
from fastamp.modeling.weights import load_pretrained_backbone
from fastamp.utils.errors import ConfigError, did_you_mean

STEM_POOLS = {
    # FastReID's since 2020-08-14; a 128-wide image gives 32 columns either way, other sizes may differ by one.
    "ceil": {"padding": 0, "ceil_mode": True},
    # torchvision's, and that of every model that FastReID published up to v0.1.1.
    "padded": {"padding": 1, "ceil_mode": False},
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, *, stride: int, norm: str, downsample: nn.Module | None):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = build_norm(norm, channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride) and 1x1 convolutions around a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, *, stride: int, norm: str, downsample: nn.Module | None):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = build_norm(norm, channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = build_norm(norm, channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


# depth -> (block, blocks per stage, torchvision's name)
DEPTHS = {
    "18x": (BasicBlock, (2, 2, 2, 2), "resnet18"),
    "34x": (BasicBlock, (3, 4, 6, 3), "resnet34"),
    "50x": (Bottleneck, (3, 4, 6, 3), "resnet50"),
    "101x": (Bottleneck, (3, 4, 23, 3), "resnet101"),
    "152x": (Bottleneck, (3, 8, 36, 3), "resnet152"),
}


class ResNet(nn.Module):
    """The convolutional part of a ResNet.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        blocks: number of blocks in each of the four stages.
        last_stride: stride of the last stage; 1 keeps a map twice as high and wide (Luo et al. 2019).
        norm: name of the normalization layer.
        stem_pool: a name in ``STEM_POOLS``.
    """

    def __init__(
        self,
        *,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        last_stride: int = 1,
        norm: str = "BN",
        stem_pool: str = "ceil",
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = build_norm(norm, 64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, **STEM_POOLS[stem_pool])
        channels = 64
        strides = (1, 2, 2, last_stride)
        for stage, (count, stride) in enumerate(zip(blocks, strides, strict=True), start=1):
            width = 64 * 2 ** (stage - 1)
            self.add_module(f"layer{stage}", _stage(block, channels, width, count, stride, norm))
            channels = width * block.expansion
        self.feature_dim = channels
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                nn.init.normal_(module.weight, 0, math.sqrt(2.0 / fan_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 3, H, W) float, normalized, to (B, feature_dim, ~H/16, ~W/16) with last_stride 1."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, channels: int, count: int, stride: int, norm: str
) -> nn.Sequential:
    """Return one stage; its first block changes width and stride."""
    out_channels = channels * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), build_norm(norm, out_channels)
        )
    layers = [block(in_channels, channels, stride=stride, norm=norm, downsample=downsample)]
    layers += [block(out_channels, channels, stride=1, norm=norm, downsample=None) for _ in range(count - 1)]
    return nn.Sequential(*layers)


@BACKBONE_REGISTRY.register()
def build_resnet_backbone(cfg: Any) -> ResNet:
    """Return the ResNet of ``MODEL.BACKBONE``, with pretrained weights if ``PRETRAIN`` is on.

    Raises:
        ConfigError: unknown ``DEPTH``.
        WeightsError: the pretrained weights cannot be had or do not fit.
    """
    backbone = cfg.MODEL.BACKBONE
    if backbone.DEPTH not in DEPTHS:
        raise ConfigError(
            f"MODEL.BACKBONE.DEPTH: {backbone.DEPTH!r} is no ResNet; choices: {', '.join(DEPTHS)}."
            f"{did_you_mean(backbone.DEPTH, DEPTHS)}"
        )
    block, blocks, torchvision_name = DEPTHS[backbone.DEPTH]
    model = ResNet(
        block=block,
        blocks=blocks,
        last_stride=backbone.LAST_STRIDE,
        norm=backbone.NORM,
        stem_pool=backbone.STEM_POOL,
    )
    if backbone.PRETRAIN:
        load_pretrained_backbone(model, path=backbone.PRETRAIN_PATH, torchvision_name=torchvision_name)
    return model
