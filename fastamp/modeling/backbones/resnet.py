"""ResNet (He et al. 2016, arXiv:1512.03385) with torchvision's parameter names, plain or with IBN, SE and attention."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.pretrained import Download, TorchvisionWeights
from fastamp.config import Key
from fastamp.layers import IBN, NonLocal, SELayer, build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import with_pretrained_weights
from fastamp.modeling.backbones.init import init_convolutions
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "MODEL.BACKBONE.STEM_POOL",
        "ceil",
        "Max pooling of the ResNet stem: ceil rounds the size up without padding, "
        "as FastReID since 2020-08-14; padded pads by 1, as torchvision and FastReID's published v0.1.1 models. "
        "ResNeXt and ResNeSt always pad.",
        choices=("ceil", "padded"),
    ),
)

STEM_POOLS = {
    # FastReID's since 2020-08-14; a 128-wide image gives 32 columns either way, other sizes may differ by one.
    "ceil": {"padding": 0, "ceil_mode": True},
    # torchvision's, and that of every model that FastReID published up to v0.1.1.
    "padded": {"padding": 1, "ceil_mode": False},
}


@dataclass(frozen=True)
class BlockParts:
    """What the blocks of a stage are made of.

    Attributes:
        norm: name of the normalization layer.
        ibn: instance norm on half of the channels of each block's first normalization (IBN-Net a).
        se: squeeze and excitation at the end of each block.
        groups: of channels in a bottleneck's 3x3 convolution (the cardinality of ResNeXt).
        base_width: channels of one such group in the first stage; it doubles with each stage.
    """

    norm: str = "BN"
    ibn: bool = False
    se: bool = False
    groups: int = 1
    base_width: int = 64

    def inner_width(self, channels: int) -> int:
        """Return the width of a bottleneck's 3x3 convolution in the stage that is ``channels`` wide without groups."""
        return channels * self.base_width // 64 * self.groups

    def first_norm(self, channels: int) -> nn.Module:
        """Return the normalization after a block's first convolution."""
        return IBN(self.norm, channels) if self.ibn else build_norm(self.norm, channels)

    def gate(self, channels: int) -> nn.Module:
        """Return what stands before the shortcut is added."""
        return SELayer(channels) if self.se else nn.Identity()


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(
        self, in_channels: int, channels: int, *, stride: int, parts: BlockParts, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = parts.first_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = build_norm(parts.norm, channels)
        self.se = parts.gate(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.se(self.bn2(self.conv2(out)))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride) and 1x1 convolutions around a shortcut."""

    expansion = 4

    def __init__(
        self, in_channels: int, channels: int, *, stride: int, parts: BlockParts, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        width = parts.inner_width(channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = parts.first_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=parts.groups, bias=False)
        self.bn2 = build_norm(parts.norm, width)
        self.conv3 = nn.Conv2d(width, channels * self.expansion, 1, bias=False)
        self.bn3 = build_norm(parts.norm, channels * self.expansion)
        self.se = parts.gate(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.se(self.bn3(self.conv3(out)))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@dataclass(frozen=True)
class Depth:
    """A ResNet by its depth.

    Attributes:
        block: the kind of block.
        blocks: blocks in each of the four stages.
        non_local: how many of a stage's last blocks have a non-local block behind them, when there are any at all.
    """

    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, int, int, int]
    non_local: tuple[int, int, int, int] = (0, 0, 0, 0)


DEPTHS = {
    "18x": Depth(BasicBlock, (2, 2, 2, 2)),
    "34x": Depth(BasicBlock, (3, 4, 6, 3)),
    "50x": Depth(Bottleneck, (3, 4, 6, 3), (0, 2, 3, 0)),
    "101x": Depth(Bottleneck, (3, 4, 23, 3), (0, 2, 9, 0)),
    "152x": Depth(Bottleneck, (3, 8, 36, 3), (0, 2, 9, 0)),  # FastReID has none; those of ResNet-101
}

_IBN_NET = "https://github.com/XingangPan/IBN-Net/releases/download/v1.0/"
# (depth, with IBN, with SE) -> ImageNet weights
PRETRAINED = {(depth, False, False): TorchvisionWeights(f"resnet{depth[:-1]}") for depth in DEPTHS} | {
    ("18x", True, False): Download(_IBN_NET + "resnet18_ibn_a-2f571257.pth"),
    ("34x", True, False): Download(_IBN_NET + "resnet34_ibn_a-94bc1577.pth"),
    ("50x", True, False): Download(_IBN_NET + "resnet50_ibn_a-d9d0bb7b.pth"),
    ("101x", True, False): Download(_IBN_NET + "resnet101_ibn_a-59ea0ac6.pth"),
    ("101x", True, True): Download(_IBN_NET + "se_resnet101_ibn_a-fabed4e2.pth"),
}


class ResNet(nn.Module):
    """The convolutional part of a ResNet.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        blocks: number of blocks in each of the four stages.
        in_channels: channels of the images.
        non_local: number of non-local blocks in each stage: behind its last blocks, one behind each.
        last_stride: stride of the last stage; 1 keeps a map twice as high and wide (Luo et al. 2019).
        norm: name of the normalization layer.
        ibn_stages: instance norm in this many of the first stages, see ``BlockParts``.
        se: squeeze and excitation in all stages.
        stem_pool: a name in ``STEM_POOLS``.
        groups: of bottlenecks, see ``BlockParts``, as ``base_width`` is.
    """

    def __init__(
        self,
        *,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        in_channels: int = 3,
        non_local: tuple[int, int, int, int] = (0, 0, 0, 0),
        last_stride: int = 1,
        norm: str = "BN",
        ibn_stages: int = 0,
        se: bool = False,
        stem_pool: str = "ceil",
        groups: int = 1,
        base_width: int = 64,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = build_norm(norm, 64)
        self.relu = nn.ReLU(inplace=True)
        self.stem_pool = stem_pool
        self.maxpool = nn.MaxPool2d(3, stride=2, **STEM_POOLS[stem_pool])
        channels = 64
        strides = (1, 2, 2, last_stride)
        for stage, (count, stride) in enumerate(zip(blocks, strides, strict=True), start=1):
            width = 64 * 2 ** (stage - 1)
            parts = BlockParts(norm=norm, ibn=stage <= ibn_stages, se=se, groups=groups, base_width=base_width)
            self.add_module(f"layer{stage}", _stage(block, channels, width, count, stride, parts))
            channels = width * block.expansion
        self.feature_dim = channels
        init_convolutions(self)
        for stage, count in enumerate(non_local, start=1):
            width = 64 * 2 ** (stage - 1) * block.expansion
            self.add_module(f"NL_{stage}", nn.ModuleList(NonLocal(width, norm) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, in_channels, H, W) float, normalized, to (B, feature_dim, ~H/16, ~W/16) with last_stride 1."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for blocks, attention in (
            (self.layer1, self.NL_1),
            (self.layer2, self.NL_2),
            (self.layer3, self.NL_3),
            (self.layer4, self.NL_4),
        ):
            first = len(blocks) - len(attention)
            for number, block in enumerate(blocks):
                x = block(x)
                if number >= first:
                    x = attention[number - first](x)
        return x


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    channels: int,
    count: int,
    stride: int,
    parts: BlockParts,
) -> nn.Sequential:
    """Return one stage; its first block changes width and stride."""
    out_channels = channels * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), build_norm(parts.norm, out_channels)
        )
    layers = [block(in_channels, channels, stride=stride, parts=parts, downsample=downsample)]
    layers += [block(out_channels, channels, stride=1, parts=parts, downsample=None) for _ in range(count - 1)]
    return nn.Sequential(*layers)


@BACKBONE_REGISTRY.register()
@variants(DEPTHS, options=("WITH_IBN", "WITH_SE", "WITH_NL"))
def build_resnet_backbone(cfg: Any) -> ResNet:
    """Return the ResNet of ``MODEL.BACKBONE`` for ``INPUT.CHANNELS``, with pretrained weights if ``PRETRAIN`` is on.

    Raises:
        ConfigError: unknown ``DEPTH``, or there are no pretrained weights of this variant.
        WeightsError: the pretrained weights cannot be had or do not fit.
    """
    backbone = cfg.MODEL.BACKBONE
    if backbone.DEPTH not in DEPTHS:
        raise ConfigError(
            f"MODEL.BACKBONE.DEPTH: {backbone.DEPTH!r} is no ResNet; choices: {', '.join(DEPTHS)}."
            f"{did_you_mean(backbone.DEPTH, DEPTHS)}"
        )
    depth = DEPTHS[backbone.DEPTH]
    if backbone.WITH_NL and not any(depth.non_local):
        logger.warning(
            "MODEL.BACKBONE.WITH_NL does nothing: a ResNet of depth %s has no non-local blocks", backbone.DEPTH
        )
    model = ResNet(
        block=depth.block,
        blocks=depth.blocks,
        in_channels=cfg.INPUT.CHANNELS,
        non_local=depth.non_local if backbone.WITH_NL else (0, 0, 0, 0),
        last_stride=backbone.LAST_STRIDE,
        norm=backbone.NORM,
        # The last stage keeps what tells identities apart, which instance norm takes away (Pan et al. 2018).
        ibn_stages=3 if backbone.WITH_IBN else 0,
        se=backbone.WITH_SE,
        stem_pool=backbone.STEM_POOL,
    )
    online = PRETRAINED.get((backbone.DEPTH, backbone.WITH_IBN, backbone.WITH_SE))
    # No ImageNet weights have non-local blocks; they start as the identity.
    return with_pretrained_weights(model, cfg, online, without=("NL_*",))
