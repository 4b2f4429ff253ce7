"""RegNet X and Y (Radosavovic et al. 2020, arXiv:2003.13678) with the parameter names of pycls and FastReID."""

import math
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

STEM_WIDTH = 32
_STAGES = ("s1", "s2", "s3", "s4")


@dataclass(frozen=True)
class Depth:
    """Parameters of a RegNet in the design space (section 3.3 of the paper).

    Attributes:
        blocks: total number of blocks.
        initial_width: w_0.
        slope: w_a, the growth of the width per block before quantization.
        step: w_m, the ratio between the widths of two consecutive stages.
        group_width: channels per group of the 3x3 convolutions.
        pycls_id: ID and name of the ImageNet weights in pycls's model zoo.
    """

    blocks: int
    initial_width: int
    slope: float
    step: float
    group_width: int
    pycls_id: str


# MODEL.BACKBONE.DEPTH is the cost in MFLOPs and the type; type y has squeeze-and-excitation. FastReID does not have
# 600, 8000, 12000, 16000 and 32000.
DEPTHS = {
    "200x": Depth(13, 24, 36.44, 2.49, 8, "160905981/RegNetX-200MF"),
    "400x": Depth(22, 24, 24.48, 2.54, 16, "160905967/RegNetX-400MF"),
    "600x": Depth(16, 48, 36.97, 2.24, 24, "160906442/RegNetX-600MF"),
    "800x": Depth(16, 56, 35.73, 2.28, 16, "160906036/RegNetX-800MF"),
    "1600x": Depth(18, 80, 34.01, 2.25, 24, "160990626/RegNetX-1.6GF"),
    "3200x": Depth(25, 88, 26.31, 2.25, 48, "160906139/RegNetX-3.2GF"),
    "4000x": Depth(23, 96, 38.65, 2.43, 40, "160906383/RegNetX-4.0GF"),
    "6400x": Depth(17, 184, 60.83, 2.07, 56, "161116590/RegNetX-6.4GF"),
    "8000x": Depth(23, 80, 49.56, 2.88, 120, "161107726/RegNetX-8.0GF"),
    "12000x": Depth(19, 168, 73.36, 2.37, 112, "160906020/RegNetX-12GF"),
    "16000x": Depth(22, 216, 55.59, 2.1, 128, "158460855/RegNetX-16GF"),
    "32000x": Depth(23, 320, 69.86, 2.0, 168, "158188473/RegNetX-32GF"),
    "200y": Depth(13, 24, 36.44, 2.49, 8, "176245422/RegNetY-200MF"),
    "400y": Depth(16, 48, 27.89, 2.09, 8, "160906449/RegNetY-400MF"),
    "600y": Depth(15, 48, 32.54, 2.32, 16, "160981443/RegNetY-600MF"),
    "800y": Depth(14, 56, 38.84, 2.4, 16, "160906567/RegNetY-800MF"),
    "1600y": Depth(27, 48, 20.71, 2.65, 24, "160906681/RegNetY-1.6GF"),
    "3200y": Depth(21, 80, 42.63, 2.66, 24, "160906834/RegNetY-3.2GF"),
    "4000y": Depth(22, 96, 31.41, 2.24, 64, "160906838/RegNetY-4.0GF"),
    "6400y": Depth(25, 112, 33.22, 2.27, 72, "160907112/RegNetY-6.4GF"),
    "8000y": Depth(17, 192, 76.82, 2.19, 56, "161160905/RegNetY-8.0GF"),
    "12000y": Depth(19, 168, 73.36, 2.37, 112, "160907100/RegNetY-12GF"),
    "16000y": Depth(18, 200, 106.23, 2.48, 112, "161303400/RegNetY-16GF"),
    "32000y": Depth(20, 232, 115.89, 2.53, 232, "161277763/RegNetY-32GF"),
}


@dataclass(frozen=True)
class Stage:
    """Output channels, number of blocks and channels per group of a stage."""

    width: int
    blocks: int
    group_width: int


def compute_stages(depth: Depth) -> list[Stage]:
    """Compute the stages of a RegNet from its parameters (eq. 2 to 4 of the paper).

    The width u_j = w_0 + w_a j of block j is quantized to the nearest w_0 w_m^s, rounded to a multiple of 8. Blocks
    with the same s form a stage. The width of a stage is then rounded to the nearest multiple of the group width.
    torchvision rounds up if rounding down would remove more than 10 % of the width; therefore its regnet_x_400mf,
    regnet_y_800mf and regnet_y_8gf are wider networks.
    """
    counts: dict[int, int] = {}
    for block in range(depth.blocks):
        exponent = round(math.log(1 + depth.slope * block / depth.initial_width) / math.log(depth.step))
        width = round(depth.initial_width * depth.step**exponent / 8) * 8
        counts[width] = counts.get(width, 0) + 1
    stages = []
    for width, blocks in counts.items():
        group_width = min(depth.group_width, width)
        stages.append(Stage(round(width / group_width) * group_width, blocks, group_width))
    return stages


class _Transform(nn.Module):
    """1x1 convolution, strided grouped 3x3 convolution, optional squeeze-and-excitation and 1x1 convolution."""

    def __init__(self, in_channels: int, channels: int, *, group_width: int, stride: int, se: bool, norm: str) -> None:
        super().__init__()
        self.a = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.a_bn = build_norm(norm, channels)
        groups = channels // group_width
        self.b = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=groups, bias=False)
        self.b_bn = build_norm(norm, channels)
        self.relu = nn.ReLU(inplace=True)
        # The reduction is relative to the input of the block, not to the width of this layer.
        self.se = SqueezeExcite(channels, round(in_channels / 4), nn.ReLU(inplace=True)) if se else nn.Identity()
        self.c = nn.Conv2d(channels, channels, 1, bias=False)
        self.c_bn = build_norm(norm, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.a_bn(self.a(x)))
        out = self.se(self.relu(self.b_bn(self.b(out))))
        return self.c_bn(self.c(out))


class Block(nn.Module):
    """Residual bottleneck block with bottleneck ratio 1.

    Args:
        in_channels: number of input channels.
        channels: number of inner and output channels.
        group_width: channels per group of the 3x3 convolution.
        stride: stride of the 3x3 convolution.
        se: add squeeze-and-excitation.
        norm: name of the normalization layer.
    """

    def __init__(self, in_channels: int, channels: int, *, group_width: int, stride: int, se: bool, norm: str) -> None:
        super().__init__()
        self.projects = in_channels != channels or stride != 1
        if self.projects:
            self.proj = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.bn = build_norm(norm, channels)
        self.f = _Transform(in_channels, channels, group_width=group_width, stride=stride, se=se, norm=norm)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = self.bn(self.proj(x)) if self.projects else x
        return self.relu(shortcut + self.f(x))


class RegNet(nn.Module, Backbone):
    """RegNet without global pooling and classifier.

    Args:
        stages: the four stages.
        se: add squeeze-and-excitation to all blocks (RegNet Y).
        in_channels: number of image channels.
        last_stride: stride of the last stage; 1 doubles the height and width of the output.
        norm: name of the normalization layer.
    """

    def __init__(
        self, *, stages: list[Stage], se: bool, in_channels: int = 3, last_stride: int = 1, norm: str = "BN"
    ) -> None:
        super().__init__()
        self.stem = Stem(in_channels, STEM_WIDTH, norm, nn.ReLU(inplace=True))
        channels = STEM_WIDTH
        for name, stage, stride in zip(_STAGES, stages, (2, 2, 2, last_stride), strict=True):
            blocks = nn.Sequential()
            for number in range(stage.blocks):
                block = Block(
                    channels,
                    stage.width,
                    group_width=stage.group_width,
                    stride=stride if number == 0 else 1,
                    se=se,
                    norm=norm,
                )
                blocks.add_module(f"b{number + 1}", block)
                channels = stage.width
            self.add_module(name, blocks)
        self.feature_dim = channels
        init_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute feature maps (B, feature_dim, h, w) from normalized images (B, in_channels, H, W).

        h and w are about H/16 and W/16 if ``last_stride`` is 1, and H/32 and W/32 if it is 2.
        """
        for part in self.children():
            x = part(x)
        return x

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert torchvision's parameter names to those of pycls."""
        names = {"stem.0": "stem.conv", "stem.1": "stem.bn"}
        parts = {"proj.0": "proj", "proj.1": "bn", "f.se.fc1": "f.se.f_ex.0", "f.se.fc2": "f.se.f_ex.2"}
        parts |= {f"f.{letter}.0": f"f.{letter}" for letter in "abc"}
        parts |= {f"f.{letter}.1": f"f.{letter}_bn" for letter in "abc"}
        for stage, name in enumerate(_STAGES, start=1):
            for number in range(len(self.get_submodule(name))):
                source, target = f"trunk_output.block{stage}.block{stage}-{number}", f"{name}.b{number + 1}"
                names |= {f"{source}.{part}": f"{target}.{parts[part]}" for part in parts}
        return rename_modules(state, names)


@BACKBONE_REGISTRY.register()
@variants(DEPTHS)
def build_regnet_backbone(cfg: CfgNode) -> RegNet:
    """Build the RegNet configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    depth = choose_depth(cfg, DEPTHS)
    model = RegNet(
        stages=compute_stages(depth),
        se=backbone.DEPTH.endswith("y"),
        in_channels=cfg.INPUT.CHANNELS,
        last_stride=backbone.LAST_STRIDE,
        norm=backbone.NORM,
    )
    return with_pretrained_weights(model, cfg, Download(f"{PYCLS}{depth.pycls_id}_dds_8gpu.pyth"))
