"""Backbones: (B, C, H, W) normalized images -> (B, D, h, w) feature maps."""

from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, build_backbone, with_feature_dim
from fastamp.modeling.backbones.resnet import ResNet, build_resnet_backbone
from fastamp.modeling.backbones.vit import VisionTransformer, build_vit_backbone

__all__ = [
    "BACKBONE_REGISTRY",
    "ResNet",
    "VisionTransformer",
    "build_backbone",
    "build_resnet_backbone",
    "build_vit_backbone",
    "with_feature_dim",
]
