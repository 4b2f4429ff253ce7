"""Backbones: (B, C, H, W) normalized images -> (B, D, h, w) feature maps."""

from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, build_backbone, with_feature_dim
from fastamp.modeling.backbones.repvgg import RepVGG, build_repvgg_backbone
from fastamp.modeling.backbones.resnest import ResNeSt, build_resnest_backbone
from fastamp.modeling.backbones.resnet import ResNet, build_resnet_backbone
from fastamp.modeling.backbones.resnext import build_resnext_backbone

__all__ = [
    "BACKBONE_REGISTRY",
    "RepVGG",
    "ResNeSt",
    "ResNet",
    "build_backbone",
    "build_repvgg_backbone",
    "build_resnest_backbone",
    "build_resnet_backbone",
    "build_resnext_backbone",
    "with_feature_dim",
]
