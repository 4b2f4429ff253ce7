"""EfficientNet B0 to B5 (Tan & Le 2019, arXiv:1905.11946) with the parameter names of pycls and FastReID."""

from dataclasses import dataclass

import torch
from torch import nn

from fastamp.checkpoint.pretrained import Download
from fastamp.checkpoint.state_dict_conversion import rename_modules
from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights
from fastamp.modeling.backbones.init import init_convolutions
from fastamp.modeling.backbones.pycls import PYCLS, SqueezeExcite, Stem

# Values for each of the seven stages, the same for all depths.
EXPANSIONS = (1, 6, 6, 6, 6, 6, 6)
KERNELS = (3, 3, 5, 3, 5, 5, 3)
STRIDES = (1, 2, 2, 2, 1, 2, 1)
_LAST_STRIDE_STAGE = 5  # index of the stage with stride MODEL.BACKBONE.LAST_STRIDE


@dataclass(frozen=True)
class Depth:
    """Configuration of an EfficientNet of a given depth.

    Attributes:
        stem: output channels of the stem.
        widths: output channels of the seven stages.
        blocks: number of blocks in each stage.
        head: channels of the output feature map.
        pycls_id: ID of the ImageNet weights in pycls's model zoo.
    """

    stem: int
    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    head: int
    pycls_id: int


DEPTHS = {
    "b0": Depth(32, (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1), 1280, 161305613),
    "b1": Depth(32, (16, 24, 40, 80, 112, 192, 320), (2, 3, 3, 4, 4, 5, 2), 1280, 161304979),
    "b2": Depth(32, (16, 24, 48, 88, 120, 208, 352), (2, 3, 3, 4, 4, 5, 2), 1408, 161305015),
    "b3": Depth(40, (24, 32, 48, 96, 136, 232, 384), (2, 3, 3, 5, 5, 6, 2), 1536, 161305060),
    "b4": Depth(48, (24, 32, 56, 112, 160, 272, 448), (2, 4, 4, 6, 6, 8, 2), 1792, 161305098),
    "b5": Depth(48, (24, 40, 64, 128, 176, 304, 512), (3, 5, 5, 7, 7, 9, 3), 2048, 161305138),
}


class MBConv(nn.Module):
    """Inverted residual block: expansion, depthwise convolution, squeeze-and-excitation and projection.

    The residual connection is used only if input and output have the same shape.

    Args:
        in_channels: number of input channels.
        channels: number of output channels.
        expansion: ratio of the channels inside the block to ``in_channels``; 1 omits the expansion convolution.
        kernel: kernel size of the depthwise convolution.
        stride: stride of the depthwise convolution.
        norm: name of the normalization layer.
    """

    def __init__(self, in_channels: int, channels: int, *, expansion: int, kernel: int, stride: int, norm: str) -> None:
        super().__init__()
        width = in_channels * expansion
        self.expands = expansion > 1
        if self.expands:
            self.exp = nn.Conv2d(in_channels, width, 1, bias=False)
            self.exp_bn = build_norm(norm, width)
        self.dwise = nn.Conv2d(width, width, kernel, stride, padding=kernel // 2, groups=width, bias=False)
        self.dwise_bn = build_norm(norm, width)
        self.swish = nn.SiLU(inplace=True)
        # The reduction is relative to the input of the block, not to the expanded width.
        self.se = SqueezeExcite(width, in_channels // 4, nn.SiLU(inplace=True))
        self.lin_proj = nn.Conv2d(width, channels, 1, bias=False)
        self.lin_proj_bn = build_norm(norm, channels)
        self.has_skip = stride == 1 and in_channels == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.swish(self.exp_bn(self.exp(x))) if self.expands else x
        out = self.se(self.swish(self.dwise_bn(self.dwise(out))))
        out = self.lin_proj_bn(self.lin_proj(out))
        return x + out if self.has_skip else out


class _Head(nn.Module):
    def __init__(self, in_channels: int, channels: int, norm: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.conv_bn = build_norm(norm, channels)
        self.swish = nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.swish(self.conv_bn(self.conv(x)))


class EfficientNet(nn.Module, Backbone):
    """EfficientNet up to the 1x1 convolution before global pooling.

    Drop-connect is not implemented; its rate is 0 in all FastReID variants.

    Args:
        depth: widths and numbers of blocks.
        in_channels: number of image channels.
        last_stride: stride of the sixth stage; 1 doubles the height and width of the output.
        norm: name of the normalization layer.
    """

    def __init__(self, depth: Depth, *, in_channels: int = 3, last_stride: int = 1, norm: str = "BN") -> None:
        super().__init__()
        self.stem = Stem(in_channels, depth.stem, norm, nn.SiLU(inplace=True))
        strides = [*STRIDES]
        strides[_LAST_STRIDE_STAGE] = last_stride
        channels = depth.stem
        for stage, (width, count) in enumerate(zip(depth.widths, depth.blocks, strict=True)):
            layers = nn.Sequential()
            for number in range(count):
                block = MBConv(
                    channels,
                    width,
                    expansion=EXPANSIONS[stage],
                    kernel=KERNELS[stage],
                    stride=strides[stage] if number == 0 else 1,
                    norm=norm,
                )
                layers.add_module(f"b{number + 1}", block)
                channels = width
            self.add_module(f"s{stage + 1}", layers)
        self.head = _Head(channels, depth.head, norm)
        self.feature_dim = depth.head
        init_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute feature maps (B, feature_dim, h, w) from normalized images (B, in_channels, H, W).

        h and w are about H/16 and W/16 if ``last_stride`` is 1, and H/32 and W/32 if it is 2.
        """
        for part in self.children():
            x = part(x)
        return x

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert torchvision's parameter names to those of pycls.

        torchvision's networks are equivalent, except that torchvision trained B5 with a batch norm epsilon of 1e-3
        instead of 1e-5.
        """
        names = {"features.0.0": "stem.conv", "features.0.1": "stem.bn"}
        for stage in range(1, len(STRIDES) + 1):
            for number, block in enumerate(self.get_submodule(f"s{stage}").children()):
                source, target = f"features.{stage}.{number}.block", f"s{stage}.b{number + 1}"
                parts = [("exp", "exp_bn")] if block.expands else []
                parts += [("dwise", "dwise_bn"), ("se.f_ex.0", "se.f_ex.2"), ("lin_proj", "lin_proj_bn")]
                for position, pair in enumerate(parts):
                    suffixes = ("fc1", "fc2") if pair[0].startswith("se") else ("0", "1")
                    for suffix, part in zip(suffixes, pair, strict=True):
                        names[f"{source}.{position}.{suffix}"] = f"{target}.{part}"
        last = len(STRIDES) + 1
        names |= {f"features.{last}.0": "head.conv", f"features.{last}.1": "head.conv_bn"}
        return rename_modules(state, names)


@BACKBONE_REGISTRY.register()
@variants(DEPTHS)
def build_effnet_backbone(cfg: CfgNode) -> EfficientNet:
    """Build the EfficientNet configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = EfficientNet(depth, in_channels=cfg.INPUT.CHANNELS, last_stride=backbone.LAST_STRIDE, norm=backbone.NORM)
    return with_pretrained_weights(
        model, cfg, Download(f"{PYCLS}{depth.pycls_id}/EN-{backbone.DEPTH.upper()}_dds_8gpu.pyth")
    )
