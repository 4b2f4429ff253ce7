"""Backbones, which map normalized images (B, C, H, W) to feature maps (B, D, h, w)."""

from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, Variants, build_backbone, variants, with_feature_dim
from fastamp.modeling.backbones.osnet import OSNet
from fastamp.modeling.backbones.resnet import ResNet

__all__ = ["BACKBONE_REGISTRY", "OSNet", "ResNet", "Variants", "build_backbone", "variants", "with_feature_dim"]
