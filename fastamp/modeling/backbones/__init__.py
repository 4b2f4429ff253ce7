"""Backbones: (B, C, H, W) normalized images -> (B, D, h, w) feature maps."""

from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, build_backbone, with_feature_dim
from fastamp.modeling.backbones.efficientnet import EfficientNet, build_effnet_backbone
from fastamp.modeling.backbones.regnet import RegNet, build_regnet_backbone
from fastamp.modeling.backbones.resnet import ResNet, build_resnet_backbone
from fastamp.modeling.backbones.swin import Swin, build_swin_backbone

__all__ = [
    "BACKBONE_REGISTRY",
    "EfficientNet",
    "RegNet",
    "ResNet",
    "Swin",
    "build_backbone",
    "build_effnet_backbone",
    "build_regnet_backbone",
    "build_resnet_backbone",
    "build_swin_backbone",
    "with_feature_dim",
]
