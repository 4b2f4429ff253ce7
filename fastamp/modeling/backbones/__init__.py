"""Backbones, which map normalized images (B, C, H, W) to feature maps (B, D, h, w)."""

from fastamp.modeling.backbones.build import BACKBONE_REGISTRY, Variants, build_backbone, variants, with_feature_dim
from fastamp.modeling.backbones.clip import ClipVisionTransformer
from fastamp.modeling.backbones.clip_resnet import ClipResNet
from fastamp.modeling.backbones.efficientnet import EfficientNet
from fastamp.modeling.backbones.mobilenet import MobileNetV2, MobileNetV3
from fastamp.modeling.backbones.osnet import OSNet
from fastamp.modeling.backbones.osnet_ain import OSNetAIN
from fastamp.modeling.backbones.regnet import RegNet
from fastamp.modeling.backbones.repvgg import RepVGG
from fastamp.modeling.backbones.resnest import ResNeSt
from fastamp.modeling.backbones.resnet import ResNet
from fastamp.modeling.backbones.resnext import build_resnext_backbone
from fastamp.modeling.backbones.shufflenet import ShuffleNetV2
from fastamp.modeling.backbones.solider import SoliderSwin
from fastamp.modeling.backbones.swin import Swin
from fastamp.modeling.backbones.two_stem_resnet import TwoStemResNet
from fastamp.modeling.backbones.vit import VisionTransformer

__all__ = [
    "BACKBONE_REGISTRY",
    "ClipResNet",
    "ClipVisionTransformer",
    "EfficientNet",
    "MobileNetV2",
    "MobileNetV3",
    "OSNet",
    "OSNetAIN",
    "RegNet",
    "RepVGG",
    "ResNeSt",
    "ResNet",
    "ShuffleNetV2",
    "SoliderSwin",
    "Swin",
    "TwoStemResNet",
    "Variants",
    "VisionTransformer",
    "build_backbone",
    "build_resnext_backbone",
    "variants",
    "with_feature_dim",
]
