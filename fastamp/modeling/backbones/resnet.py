"""ResNet (He et al. 2016, arXiv:1512.03385) with torchvision's parameter names; options: IBN, SE, non-local blocks."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.pretrained import Download, TorchvisionWeights
from fastamp.config import CfgNode, Key
from fastamp.contracts import Backbone
from fastamp.layers import IBN, MixStyle, NonLocal, SELayer, build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import LayerGroups, with_pretrained_weights
from fastamp.modeling.backbones.init import init_convolutions
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "MODEL.BACKBONE.STEM_POOL",
        "ceil",
        "Max pooling of the ResNet stem. ceil: no padding, output size rounded up, as in FastReID since 2020-08-14. "
        "padded: padding 1, as in torchvision and FastReID's published v0.1.1 models. ResNeXt and ResNeSt always use "
        "padded.",
        choices=("ceil", "padded"),
    ),
    Key(
        "MODEL.BACKBONE.STEM_RELU",
        True,
        "ResNet: ReLU in the stem. False: none, as in the ResNets of reid-strong-baseline (Luo et al. 2019) and of "
        "AGW's program for visible images (Ye et al. 2021), whose IBN and SE variants have one.",
    ),
    Key(
        "MODEL.BACKBONE.MIXSTYLE",
        False,
        "ResNet: mix the channel means and deviations of the images of a batch after stages 1 and 2 in training "
        "(MixStyle, Zhou et al. 2021), for test sets of other domains.",
    ),
    Key("MODEL.BACKBONE.MIXSTYLE_PROB", 0.5, "MixStyle: probability for a batch and stage.", low=0, high=1),
    Key("MODEL.BACKBONE.MIXSTYLE_ALPHA", 0.1, "MixStyle: parameter of the Beta distribution of the weights.", above=0),
)

STEM_POOLS = {
    # FastReID since 2020-08-14. Both give 32 columns for a width of 128; other sizes may differ by one.
    "ceil": {"padding": 0, "ceil_mode": True},
    # torchvision, and all models that FastReID published up to v0.1.1.
    "padded": {"padding": 1, "ceil_mode": False},
}


@dataclass(frozen=True)
class BlockParts:
    """Options of the blocks in a stage.

    Attributes:
        norm: name of the normalization layer.
        ibn: use instance norm for half of the channels in the first normalization of each block (IBN-Net-a).
        se: add squeeze-and-excitation at the end of each block.
        groups: number of groups of the 3x3 convolution in a bottleneck (ResNeXt's cardinality).
        base_width: channels per group in the first stage; doubled in each later stage.
    """

    norm: str = "BN"
    ibn: bool = False
    se: bool = False
    groups: int = 1
    base_width: int = 64

    def inner_width(self, channels: int) -> int:
        """Compute the width of a bottleneck's 3x3 convolution; ``channels`` is the width in a ResNet without groups."""
        return channels * self.base_width // 64 * self.groups

    def first_norm(self, channels: int) -> nn.Module:
        """Build the normalization after the first convolution of a block."""
        return IBN(self.norm, channels) if self.ibn else build_norm(self.norm, channels)

    def gate(self, channels: int) -> nn.Module:
        """Build the module before the residual addition: squeeze-and-excitation or identity."""
        return SELayer(channels) if self.se else nn.Identity()


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions."""

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
    """Residual block of 1x1, 3x3 and 1x1 convolutions; the stride is in the 3x3 convolution."""

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
    """Configuration of a ResNet of a given depth.

    Attributes:
        block: class of the residual blocks.
        blocks: number of blocks in each of the four stages.
        non_local: number n of non-local blocks in each stage if non-local blocks are enabled. Each of the last n
            residual blocks of the stage is followed by a non-local block.
    """

    block: type[BasicBlock] | type[Bottleneck]
    blocks: tuple[int, int, int, int]
    non_local: tuple[int, int, int, int] = (0, 0, 0, 0)


DEPTHS = {
    "18x": Depth(BasicBlock, (2, 2, 2, 2)),
    "34x": Depth(BasicBlock, (3, 4, 6, 3)),
    "50x": Depth(Bottleneck, (3, 4, 6, 3), (0, 2, 3, 0)),
    "101x": Depth(Bottleneck, (3, 4, 23, 3), (0, 2, 9, 0)),
    "152x": Depth(Bottleneck, (3, 8, 36, 3), (0, 2, 9, 0)),  # FastReID has no ResNet-152; as ResNet-101
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


class ResNet(nn.Module, Backbone):
    """ResNet without global pooling and classifier.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        blocks: number of blocks in each of the four stages.
        in_channels: number of image channels.
        non_local: number n of non-local blocks in each stage. Each of the last n residual blocks of the stage is
            followed by a non-local block.
        last_stride: stride of the last stage; 1 doubles the height and width of the output (Luo et al. 2019,
            arXiv:1903.07071).
        norm: name of the normalization layer.
        ibn_stages: number of stages, counted from the first, with instance norm; see ``BlockParts``.
        se: add squeeze-and-excitation in all stages.
        stem_pool: max pooling of the stem, a key of ``STEM_POOLS``.
        stem_relu: ReLU in the stem. Default True.
        groups, base_width: see ``BlockParts``.
        mixstyle: module applied after stages 1 and 2. Default None: no module.
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
        stem_relu: bool = True,
        groups: int = 1,
        base_width: int = 64,
        mixstyle: MixStyle | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = build_norm(norm, 64)
        self.relu = nn.ReLU(inplace=True) if stem_relu else nn.Identity()
        self.stem_pool, self.stem_relu = stem_pool, stem_relu
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
        self.mixstyle = mixstyle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute feature maps (B, feature_dim, h, w) from normalized images (B, in_channels, H, W).

        h and w are about H/16 and W/16 if ``last_stride`` is 1, and H/32 and W/32 if it is 2.
        """
        return self.stages(self.maxpool(self.relu(self.bn1(self.conv1(x)))))

    def layer_groups(self) -> LayerGroups:
        """List the four stages, which count as blocks, with their non-local blocks; no module follows the last one."""
        stages: LayerGroups = [[self.get_submodule(f"layer{n}"), self.get_submodule(f"NL_{n}")] for n in range(1, 5)]
        return [*stages, []]

    def stages(self, x: torch.Tensor) -> torch.Tensor:
        """Compute feature maps from the output (B, 64, h, w) of the stem."""
        parts: tuple[tuple[Any, Any, nn.Module | None], ...] = (
            (self.layer1, self.NL_1, self.mixstyle),
            (self.layer2, self.NL_2, self.mixstyle),
            (self.layer3, self.NL_3, None),
            (self.layer4, self.NL_4, None),
        )
        for blocks, attention, mix in parts:
            first = len(blocks) - len(attention)
            for number, block in enumerate(blocks):
                x = block(x)
                if number >= first:
                    x = attention[number - first](x)
            if mix is not None:
                x = mix(x)
        return x


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    channels: int,
    count: int,
    stride: int,
    parts: BlockParts,
) -> nn.Sequential:
    """Build a stage. Only the first block has a stride and changes the number of channels."""
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
def build_resnet_backbone(cfg: CfgNode) -> ResNet:
    """Build the ResNet configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or if no pretrained weights are published for this variant.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    # ImageNet weights do not contain the non-local blocks, which are initialized to the identity.
    return with_pretrained_weights(ResNet(**resnet_options(cfg)), cfg, pretrained_weights(cfg), without=("NL_*",))


def pretrained_weights(cfg: CfgNode) -> TorchvisionWeights | Download | None:
    """Return the ImageNet weights published for the ResNet configured in ``MODEL.BACKBONE``; None if there are none."""
    backbone = cfg.MODEL.BACKBONE
    return PRETRAINED.get((backbone.DEPTH, backbone.WITH_IBN, backbone.WITH_SE))


def resnet_options(cfg: CfgNode) -> dict[str, Any]:
    """Return the constructor arguments of the ResNet configured in ``MODEL.BACKBONE``.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
    """
    backbone = cfg.MODEL.BACKBONE
    if backbone.DEPTH not in DEPTHS:
        raise ConfigError(
            f"MODEL.BACKBONE.DEPTH: unknown ResNet depth {backbone.DEPTH!r}; choices: {', '.join(DEPTHS)}."
            f"{did_you_mean(backbone.DEPTH, DEPTHS)}"
        )
    depth = DEPTHS[backbone.DEPTH]
    if backbone.WITH_NL and not any(depth.non_local):
        logger.warning(
            "MODEL.BACKBONE.WITH_NL is ignored: a ResNet of depth %s has no non-local blocks.\n  fix: set it to False",
            backbone.DEPTH,
        )
    return {
        "block": depth.block,
        "blocks": depth.blocks,
        "in_channels": cfg.INPUT.CHANNELS,
        "non_local": depth.non_local if backbone.WITH_NL else (0, 0, 0, 0),
        "last_stride": backbone.LAST_STRIDE,
        "norm": backbone.NORM,
        # Instance norm removes discriminative information, so the last stage has none (Pan et al. 2018).
        "ibn_stages": 3 if backbone.WITH_IBN else 0,
        "se": backbone.WITH_SE,
        "stem_pool": backbone.STEM_POOL,
        "stem_relu": backbone.STEM_RELU,
        "mixstyle": MixStyle(backbone.MIXSTYLE_PROB, backbone.MIXSTYLE_ALPHA) if backbone.MIXSTYLE else None,
    }
