"""ResNeSt with radix 2 (Zhang et al. 2020, arXiv:2004.08955) and the parameter names of its authors."""

from dataclasses import dataclass

import torch
from torch import nn

from fastamp.checkpoint.pretrained import Download
from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.init import init_convolutions

EXPANSION = 4


class SplitAttention(nn.Module):
    """Split attention: a 3x3 convolution outputs ``radix`` splits, which are summed with softmax weights (section 3.1).

    Args:
        channels: number of input and output channels.
        dilation: dilation of the convolution.
        norm: name of the normalization layer.
        radix: number of splits. Default 2.
    """

    def __init__(self, channels: int, *, dilation: int, norm: str, radix: int = 2) -> None:
        super().__init__()
        self.radix = radix
        hidden = max(channels * radix // 4, 32)
        self.conv = nn.Conv2d(
            channels, channels * radix, 3, padding=dilation, dilation=dilation, groups=radix, bias=False
        )
        self.bn0 = build_norm(norm, channels * radix)
        self.relu = nn.ReLU(inplace=True)
        self.fc1 = nn.Conv2d(channels, hidden, 1)
        self.bn1 = build_norm(norm, hidden)
        self.fc2 = nn.Conv2d(hidden, channels * radix, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a (B, C, H, W) tensor to a tensor of the same shape."""
        splits = self.relu(self.bn0(self.conv(x))).unflatten(1, (self.radix, -1))  # (B, radix, C, H, W)
        pooled = splits.sum(1).mean((2, 3), keepdim=True)
        logits = self.fc2(self.relu(self.bn1(self.fc1(pooled)))).unflatten(1, (self.radix, -1))
        # Autocast runs softmax in float32.
        return (splits * logits.softmax(1).to(splits.dtype)).sum(1)


class SplitAttentionBlock(nn.Module):
    """Residual block of a 1x1 convolution, split attention and a 1x1 convolution.

    Args:
        in_channels: number of input channels.
        channels: number of channels of the split attention; the output has ``EXPANSION`` times as many.
        stride: stride of the average pooling after the split attention.
        dilation: dilation of the split attention.
        pool: add average pooling after the split attention.
        norm: name of the normalization layer.
        downsample: module on the shortcut; None for the identity.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int = 1,
        dilation: int,
        pool: bool = False,
        norm: str,
        downsample: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.conv2 = SplitAttention(channels, dilation=dilation, norm=norm)
        self.avd_layer = nn.AvgPool2d(3, stride, padding=1) if pool else nn.Identity()
        self.conv3 = nn.Conv2d(channels, channels * EXPANSION, 1, bias=False)
        self.bn3 = build_norm(norm, channels * EXPANSION)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.avd_layer(self.conv2(out))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


@dataclass(frozen=True)
class Depth:
    """Configuration of a ResNeSt of a given depth.

    Attributes:
        blocks: number of blocks in each of the four stages.
        stem_width: output channels of the first two convolutions of the stem; the third has twice as many.
        pretrained: the authors' ImageNet weights.
    """

    blocks: tuple[int, int, int, int]
    stem_width: int
    pretrained: Download


_RELEASE = "https://github.com/zhanghang1989/ResNeSt/releases/download/weights_step1/"

DEPTHS = {
    "50x": Depth((3, 4, 6, 3), 32, Download(_RELEASE + "resnest50-528c19ca.pth")),
    "101x": Depth((3, 4, 23, 3), 64, Download(_RELEASE + "resnest101-22405ba7.pth")),
    "200x": Depth((3, 24, 36, 3), 64, Download(_RELEASE + "resnest200-75117900.pth")),
    "269x": Depth((3, 30, 48, 8), 64, Download(_RELEASE + "resnest269-0cc87c48.pth")),
}


class ResNeSt(nn.Module, Backbone):
    """ResNeSt without global pooling and classifier.

    Args:
        depth: width of the stem and numbers of blocks.
        in_channels: number of image channels.
        last_stride: stride of the last stage; if 1, all blocks of this stage except the first have dilation 2.
        norm: name of the normalization layer.
    """

    def __init__(self, depth: Depth, *, in_channels: int = 3, last_stride: int = 1, norm: str = "BN") -> None:
        super().__init__()
        stem_width, channels = depth.stem_width, 2 * depth.stem_width
        self.conv1 = nn.Sequential(
            nn.Conv2d(in_channels, stem_width, 3, stride=2, padding=1, bias=False),
            build_norm(norm, stem_width),
            nn.ReLU(inplace=True),
            nn.Conv2d(stem_width, stem_width, 3, padding=1, bias=False),
            build_norm(norm, stem_width),
            nn.ReLU(inplace=True),
            nn.Conv2d(stem_width, channels, 3, padding=1, bias=False),
        )
        self.bn1 = build_norm(norm, channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        strides = (1, 2, 2, last_stride)
        for stage, (count, stride) in enumerate(zip(depth.blocks, strides, strict=True), start=1):
            width = 64 * 2 ** (stage - 1)
            dilation = 2 if stage == 4 and last_stride == 1 else 1
            layers = _stage(channels, width, count, stride=stride, dilation=dilation, pool=stage > 1, norm=norm)
            self.add_module(f"layer{stage}", layers)
            channels = width * EXPANSION
        self.feature_dim = channels
        init_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute feature maps (B, feature_dim, h, w) from normalized images (B, in_channels, H, W).

        h and w are about H/16 and W/16 if ``last_stride`` is 1, and H/32 and W/32 if it is 2.
        """
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def _stage(
    in_channels: int, channels: int, count: int, *, stride: int, dilation: int, pool: bool, norm: str
) -> nn.Sequential:
    """Build a stage. ``stride`` and ``pool`` apply only to the first block, ``dilation`` to all other blocks."""
    out_channels = channels * EXPANSION
    downsample = nn.Sequential(
        nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False),
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        build_norm(norm, out_channels),
    )
    first = SplitAttentionBlock(
        in_channels, channels, stride=stride, dilation=1, pool=pool, norm=norm, downsample=downsample
    )
    rest = (SplitAttentionBlock(out_channels, channels, dilation=dilation, norm=norm) for _ in range(count - 1))
    return nn.Sequential(first, *rest)


@BACKBONE_REGISTRY.register()
@variants(DEPTHS)
def build_resnest_backbone(cfg: CfgNode) -> ResNeSt:
    """Build the ResNeSt configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = ResNeSt(depth, in_channels=cfg.INPUT.CHANNELS, last_stride=backbone.LAST_STRIDE, norm=backbone.NORM)
    return with_pretrained_weights(model, cfg, depth.pretrained)
