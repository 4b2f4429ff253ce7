"""IResNet, the residual network of face recognition (Deng et al. 2019, arXiv:1801.07698)."""

import torch
from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.layers import build_norm
from fastamp.modeling.backbones import BACKBONE_REGISTRY
from fastamp.modeling.backbones.build import variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights

KEYS = (
    Key(
        "MODEL.BACKBONE.DROPOUT",
        0.0,
        "IResNet: probability of setting a value of the last feature map to 0 in training.",
        low=0,
        high=1,
    ),
)

BLOCKS = {
    "18x": (2, 2, 2, 2),
    "34x": (3, 4, 6, 3),
    "50x": (3, 4, 14, 3),
    "100x": (3, 13, 30, 3),
    "200x": (6, 26, 60, 6),
}
"""Number of blocks in each stage for each ``MODEL.BACKBONE.DEPTH``."""
WIDTHS = (64, 128, 256, 512)


class SqueezeExcitation(nn.Module):
    """Scale channels by a function of their means (Hu et al. 2018, arXiv:1709.01507).

    Args:
        channels: number of channels.
        reduction: ratio of the channels to the hidden width. Default 16.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction),
            nn.PReLU(),
            nn.Linear(channels // reduction, channels),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, H, W) to a tensor of the same shape."""
        return x * self.fc(x.mean(dim=(2, 3)))[:, :, None, None]


class Block(nn.Module):
    """Residual block: batch norm, 3x3 convolution, batch norm, PReLU, 3x3 convolution with the stride, batch norm.

    Args:
        inputs, channels: numbers of input and output channels.
        stride: stride of the second convolution.
        norm: name in ``NORM_REGISTRY``.
        with_se: apply ``SqueezeExcitation`` before the sum.
    """

    def __init__(self, inputs: int, channels: int, *, stride: int, norm: str, with_se: bool) -> None:
        super().__init__()
        self.bn1 = build_norm(norm, inputs)
        self.conv1 = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
        self.bn2 = build_norm(norm, channels)
        self.prelu = nn.PReLU(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn3 = build_norm(norm, channels)
        self.se = SqueezeExcitation(channels) if with_se else nn.Identity()
        self.downsample: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, inputs, H, W) to (B, channels, H / stride, W / stride)."""
        y = self.conv1(self.bn1(x))
        y = self.bn3(self.conv2(self.prelu(self.bn2(y))))
        return self.se(y) + self.downsample(x)


class IResNet(nn.Module):
    """Residual network without pooling in the stem, for aligned face images, e.g. of 112 x 112 pixels.

    Args:
        blocks: number of blocks in each of the four stages, which halve the resolution.
        in_channels: number of image channels. Default 3.
        norm: name in ``NORM_REGISTRY``. Default ``"BN"``.
        with_se: use ``SqueezeExcitation``. Default False.
        dropout: probability of setting a value of the feature map to 0 in training. Default 0.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        *,
        in_channels: int = 3,
        norm: str = "BN",
        with_se: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = build_norm(norm, WIDTHS[0])
        self.prelu = nn.PReLU(WIDTHS[0])
        inputs = WIDTHS[0]
        for stage, (count, channels) in enumerate(zip(blocks, WIDTHS, strict=True), start=1):
            layer = nn.Sequential()
            for number in range(count):
                stride = 1 if number else 2
                block = Block(inputs, channels, stride=stride, norm=norm, with_se=with_se)
                if number == 0:
                    shortcut = nn.Conv2d(inputs, channels, 1, stride, bias=False)
                    block.downsample = nn.Sequential(shortcut, build_norm(norm, channels))
                layer.append(block)
                inputs = channels
            self.add_module(f"layer{stage}", layer)
        self.bn2 = build_norm(norm, inputs)
        self.dropout = nn.Dropout(dropout)
        self.feature_dim = inputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W) to features (B, 512, ~H/16, ~W/16)."""
        x = self.prelu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.dropout(self.bn2(x))


@BACKBONE_REGISTRY.register()
@variants(BLOCKS, options=("WITH_SE",))
def build_iresnet_backbone(cfg: CfgNode) -> IResNet:
    """Build the IResNet configured in ``MODEL.BACKBONE``; load ``PRETRAIN_PATH`` if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown, or ``PRETRAIN`` is True without ``PRETRAIN_PATH``.
        WeightsError: if the pretrained weights cannot be read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    model = IResNet(
        choose_depth(cfg, BLOCKS, supported=("WITH_SE",)),
        in_channels=cfg.INPUT.CHANNELS,
        norm=backbone.NORM,
        with_se=backbone.WITH_SE,
        dropout=backbone.DROPOUT,
    )
    return with_pretrained_weights(model, cfg, None)


@BACKBONE_REGISTRY.register()
def build_resnetIR_backbone(cfg: CfgNode) -> IResNet:
    """Build the network that FastReID's ``r101_ir.yml`` names, which its code no longer contains: IResNet with SE."""
    return build_iresnet_backbone(cfg)
