"""OSNet (Zhou et al. 2019, arXiv:1905.00953) with the parameter names of FastReID and torchreid."""

from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.pretrained import Download
from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights

# Channels of the stem and of the three stages.
CHANNELS = {
    "x1_0": (64, 256, 384, 512),
    "x0_75": (48, 192, 288, 384),
    "x0_5": (32, 128, 192, 256),
    "x0_25": (16, 64, 96, 128),
}

# Reduction of the width inside a block, and of the hidden layer of its gate.
_BOTTLENECK = 4
_GATE_REDUCTION = 16


def torchreid_weights(name: str, drive_id: str) -> Download:
    """Return the ``Download`` of ImageNet weights for the torchreid model ``name``."""
    return Download(f"https://drive.google.com/uc?export=download&id={drive_id}", f"{name}_imagenet.pth")


# (depth, with IBN) -> ImageNet weights
PRETRAINED = {
    ("x1_0", False): torchreid_weights("osnet_x1_0", "1LaG1EJpHrxdAxKnSCJ_i0u-nbxSAeiFY"),
    ("x0_75", False): torchreid_weights("osnet_x0_75", "1uwA9fElHOk3ZogwbeY5GkLI6QPTX70Hq"),
    ("x0_5", False): torchreid_weights("osnet_x0_5", "16DGLbZukvVYgINws8u8deSaOqjybZ83i"),
    ("x0_25", False): torchreid_weights("osnet_x0_25", "1rb8UN5ZzPKRc_xvtHlyDh-cSz88YX9hs"),
    ("x1_0", True): torchreid_weights("osnet_ibn_x1_0", "1sr90V6irlYYDd4_4ISU2iruoRG8J__6l"),
}


class ConvNorm(nn.Module):
    """Convolution, normalization and ReLU.

    Args:
        in_channels, out_channels: number of input and output channels.
        norm: normalization layer.
        kernel_size: kernel size, odd; the padding is ``kernel_size // 2``.
        stride: stride of the convolution.
        linear: omit the ReLU.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        norm: nn.Module,
        kernel_size: int = 1,
        stride: int = 1,
        linear: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)
        self.bn = norm
        self.relu = nn.Identity() if linear else nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.bn(self.conv(x)))


class LightConv3x3(nn.Module):
    """1x1 convolution, depthwise 3x3 convolution, normalization and ReLU."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn = build_norm(norm, channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.bn(self.conv2(self.conv1(x))))


class _PoolAndKeep(torch.autograd.Function):
    """Global average pooling of ``x`` (B, C, H, W) that also returns ``x``.

    The backward pass adds the gradients of both outputs in one operation. Autograd would first materialize the gradient
    of the mean in contiguous format; adding that to a channels_last gradient is six times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.uses_parameters = False  # for ``check_losses``
        ctx.pixels = x.shape[2] * x.shape[3]
        return x.view_as(x), x.mean((2, 3), keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_mean: torch.Tensor) -> torch.Tensor:
        return grad + grad_mean / ctx.pixels


class ChannelGate(nn.Module):
    """Scale each channel by a gate in 0..1, computed from the global averages of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // _GATE_REDUCTION, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(channels // _GATE_REDUCTION, channels, 1)

    def forward(self, *streams: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gated streams, all of the same shape (B, C, H, W)."""
        streams, averages = zip(*map(_pool, streams), strict=True)
        if averages[0].dtype in (torch.float16, torch.bfloat16) or not torch.is_grad_enabled():
            # One pass for all streams is faster. In float32, it would change the rounding of the gradients.
            gates = self._gate(torch.cat(averages, 2)).split(1, 2)
        else:
            gates = [self._gate(average) for average in averages]
        first, *rest = (x * gate for x, gate in zip(streams, gates, strict=True))
        return sum(rest, start=first)

    def _gate(self, average: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc2(self.relu(self.fc1(average))))


def _pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and its global average."""
    return _PoolAndKeep.apply(x) if x.requires_grad else (x, x.mean((2, 3), keepdim=True))


class OSBlock(nn.Module):
    """Residual block of four streams with receptive fields 3, 5, 7 and 9, fused by a shared channel gate.

    Args:
        in_channels, out_channels: number of input and output channels.
        norm: name of the normalization layer.
        instance_norm: apply instance norm after the residual addition (OSNet-IBN).
    """

    def __init__(self, in_channels: int, out_channels: int, *, norm: str, instance_norm: bool = False) -> None:
        super().__init__()
        channels = out_channels // _BOTTLENECK
        self.conv1 = ConvNorm(in_channels, channels, norm=build_norm(norm, channels))
        self.conv2a = LightConv3x3(channels, norm)
        self.conv2b = nn.Sequential(*(LightConv3x3(channels, norm) for _ in range(2)))
        self.conv2c = nn.Sequential(*(LightConv3x3(channels, norm) for _ in range(3)))
        self.conv2d = nn.Sequential(*(LightConv3x3(channels, norm) for _ in range(4)))
        self.gate = ChannelGate(channels)
        self.conv3 = ConvNorm(channels, out_channels, norm=build_norm(norm, out_channels), linear=True)
        self.downsample = shortcut(in_channels, out_channels, norm)
        self.IN = nn.InstanceNorm2d(out_channels, affine=True) if instance_norm else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduced = self.conv1(x)
        a, b, c, d = self.conv2a(reduced), self.conv2b(reduced), self.conv2c(reduced), self.conv2d(reduced)
        out = self.conv3(self.gate(a, b, c, d))
        return self.relu(self.IN(out + self.downsample(x)))


def shortcut(in_channels: int, out_channels: int, norm: str) -> nn.Module:
    """Build the shortcut of a block: a 1x1 convolution with normalization if the width changes, else the identity."""
    if in_channels == out_channels:
        return nn.Identity()
    return ConvNorm(in_channels, out_channels, norm=build_norm(norm, out_channels), linear=True)


def transition(channels: int, norm: str) -> nn.Sequential:
    """Build the transition after a stage: 1x1 convolution and 2x2 average pooling."""
    return nn.Sequential(ConvNorm(channels, channels, norm=build_norm(norm, channels)), nn.AvgPool2d(2, stride=2))


def init_weights(model: nn.Module) -> None:
    """Apply Kaiming initialization for ReLU to all convolutions of ``model`` (He et al. 2015, arXiv:1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class OSNet(nn.Module, Backbone):
    """OSNet without global pooling and classifier: a stem, three stages of two blocks, and a 1x1 convolution.

    ``MODEL.BACKBONE.STEM_POOL`` is not used: the max pooling is padded in both FastReID and torchreid.

    Args:
        channels: output channels of the stem and of the three stages.
        in_channels: number of image channels.
        norm: name of the normalization layer.
        ibn: use instance norm in the stem (instead of ``norm``) and in the first stage, as in torchreid's
            osnet_ibn_x1_0.
    """

    def __init__(
        self, *, channels: tuple[int, int, int, int], in_channels: int = 3, norm: str = "BN", ibn: bool = False
    ) -> None:
        super().__init__()
        stem, first, second, third = channels
        stem_norm = nn.InstanceNorm2d(stem, affine=True) if ibn else build_norm(norm, stem)
        self.conv1 = ConvNorm(in_channels, stem, norm=stem_norm, kernel_size=7, stride=2)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.conv2 = nn.Sequential(
            OSBlock(stem, first, norm=norm, instance_norm=ibn),
            OSBlock(first, first, norm=norm, instance_norm=ibn),
            transition(first, norm),
        )
        self.conv3 = nn.Sequential(
            OSBlock(first, second, norm=norm), OSBlock(second, second, norm=norm), transition(second, norm)
        )
        self.conv4 = nn.Sequential(OSBlock(second, third, norm=norm), OSBlock(third, third, norm=norm))
        self.conv5 = ConvNorm(third, third, norm=build_norm(norm, third))
        self.feature_dim = third
        init_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W), float, to (B, feature_dim, ~H/16, ~W/16)."""
        x = self.maxpool(self.conv1(x))
        return self.conv5(self.conv4(self.conv3(self.conv2(x))))


@BACKBONE_REGISTRY.register()
@variants(CHANNELS, options=("WITH_IBN",))
def build_osnet_backbone(cfg: CfgNode) -> OSNet:
    """Build the OSNet configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or if no pretrained weights are published for this variant.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    channels = choose_depth(cfg, CHANNELS, supported=("WITH_IBN",))
    model = OSNet(channels=channels, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM, ibn=backbone.WITH_IBN)
    return with_pretrained_weights(model, cfg, PRETRAINED.get((backbone.DEPTH, backbone.WITH_IBN)))
