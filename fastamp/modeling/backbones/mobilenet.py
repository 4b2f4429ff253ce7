"""MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381) and MobileNetV3 (Howard et al. 2019, arXiv:1905.02244).

FastReID's MobileNetV2 is equivalent to torchvision's, with different parameter names. Its MobileNetV3 has torchvision's
parameter names, but a different batch norm epsilon and a different last layer.
"""

from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn

from fastamp.checkpoint.pretrained import Download, TorchvisionWeights
from fastamp.checkpoint.state_dict_conversion import rename_modules
from fastamp.config import CfgNode
from fastamp.contracts import Backbone
from fastamp.layers import build_norm
from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, variants
from fastamp.modeling.backbones.build_utils import choose_depth, with_pretrained_weights

WIDTHS = {"1.0x": 1.0, "0.75x": 0.75, "0.5x": 0.5, "0.35x": 0.35, "0.25x": 0.25, "0.1x": 0.1}

# Published with the implementation that FastReID's is based on, so the files have FastReID's parameter names.
_RELEASE = "https://github.com/d-li14/mobilenetv2.pytorch/raw/master/pretrained/"
PRETRAINED_V2 = {
    "1.0x": TorchvisionWeights("mobilenet_v2"),
    "0.75x": Download(_RELEASE + "mobilenetv2_0.75-dace9791.pth"),
    "0.5x": Download(_RELEASE + "mobilenetv2_0.5-eaa6f9ad.pth"),
    "0.35x": Download(_RELEASE + "mobilenetv2_0.35-b2e15951.pth"),
    "0.25x": Download(_RELEASE + "mobilenetv2_0.25-b61d2159.pth"),
    "0.1x": Download(_RELEASE + "mobilenetv2_0.1-7d1d638a.pth"),
}

V3_MODELS = {"Large": "mobilenet_v3_large", "Small": "mobilenet_v3_small"}


class MobileNetV2(nn.Module, Backbone):
    """torchvision's MobileNetV2 without global pooling and classifier.

    Args:
        width: width multiplier; the last layer always has 1280 channels.
        in_channels: number of image channels.
        norm: name of the normalization layer.
    """

    feature_dim = 1280

    def __init__(self, *, width: float, in_channels: int = 3, norm: str = "BN") -> None:
        super().__init__()
        self.features = torchvision.models.MobileNetV2(
            width_mult=width,
            # As in FastReID: rounding to multiples of 8 would make the 0.1x model much wider.
            round_nearest=4 if width == 0.1 else 8,
            norm_layer=partial(build_norm, norm),
        ).features
        _set_image_channels(self.features, in_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W), float, to (B, 1280, ~H/32, ~W/32)."""
        return self.features(x)

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert FastReID's parameter names, which number the layers of a block consecutively."""
        if "conv.0.weight" not in state:
            return state
        names = {f"conv.{layer}": f"features.{len(self.features) - 1}.{layer}" for layer in range(2)}
        for number, block in enumerate(self.features[1:-1], start=1):
            layers = (name for name, module in block.conv.named_modules() if not list(module.children()))
            prefix = f"features.{number}.conv"
            names |= {f"{prefix}.{position}": f"{prefix}.{name}" for position, name in enumerate(layers)}
        return rename_modules(state, names)


class MobileNetV3(nn.Module, Backbone):
    """torchvision's MobileNetV3 without global pooling and classifier, followed by FastReID's 1x1 convolution.

    The 1x1 convolution, with normalization and ReLU6, replaces the first layer of torchvision's classifier. The batch
    norm epsilon is 1e-5, as in FastReID, instead of torchvision's 1e-3.

    Args:
        model: name of the model in torchvision.
        in_channels: number of image channels.
        norm: name of the normalization layer.
    """

    def __init__(self, *, model: str, in_channels: int = 3, norm: str = "BN") -> None:
        super().__init__()
        network = torchvision.models.get_model(model, weights=None, norm_layer=partial(build_norm, norm))
        self.features = network.features
        _set_image_channels(self.features, in_channels)
        last = network.classifier[0]
        self.conv = nn.Sequential(
            nn.Conv2d(last.in_features, last.out_features, 1, bias=False),
            build_norm(norm, last.out_features),
            nn.ReLU6(inplace=True),
        )
        _init_convolution(self.conv[0])
        self.feature_dim = last.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalized images (B, in_channels, H, W), float, to (B, feature_dim, ~H/32, ~W/32)."""
        return self.conv(self.features(x))


def _set_image_channels(features: Any, channels: int) -> None:
    """Replace the first convolution if the images do not have three channels."""
    first = features[0][0]
    if channels != first.in_channels:
        features[0][0] = nn.Conv2d(
            channels, first.out_channels, first.kernel_size, first.stride, first.padding, bias=False
        )
        _init_convolution(features[0][0])


def _init_convolution(convolution: nn.Conv2d) -> None:
    """Initialize a convolution as in torchvision and FastReID (He et al. 2015, arXiv:1502.01852)."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out")


@BACKBONE_REGISTRY.register()
@variants(WIDTHS)
def build_mobilenetv2_backbone(cfg: CfgNode) -> MobileNetV2:
    """Build the MobileNetV2 configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    width = choose_depth(cfg, WIDTHS)
    model = MobileNetV2(width=width, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM)
    return with_pretrained_weights(model, cfg, PRETRAINED_V2[backbone.DEPTH])


@BACKBONE_REGISTRY.register()
@variants(V3_MODELS)
def build_mobilenetv3_backbone(cfg: CfgNode) -> MobileNetV3:
    """Build the MobileNetV3 configured in ``MODEL.BACKBONE``; load pretrained weights if ``PRETRAIN`` is True.

    Raises:
        ConfigError: if ``DEPTH`` is unknown.
        WeightsError: if the pretrained weights cannot be downloaded or read, or do not match the model.
    """
    backbone = cfg.MODEL.BACKBONE
    # The network has squeeze-and-excitation, as in the paper.
    name = choose_depth(cfg, V3_MODELS, supported=("WITH_SE",))
    model = MobileNetV3(model=name, in_channels=cfg.INPUT.CHANNELS, norm=backbone.NORM)
    # ImageNet weights do not contain the last convolution, which stays randomly initialized.
    return with_pretrained_weights(model, cfg, TorchvisionWeights(name), without=("conv.*",))
