"""Registry of backbones, and FastReID's functions ``build_<name>_backbone(cfg)``."""

import functools
from typing import Any

from fastamp.modeling.backbones import BACKBONE_REGISTRY, build_backbone

__all__ = [
    "BACKBONE_REGISTRY",
    "build_backbone",
    "build_effnet_backbone",
    "build_mobilenetv2_backbone",
    "build_mobilenetv3_backbone",
    "build_osnet_backbone",
    "build_regnet_backbone",
    "build_repvgg_backbone",
    "build_resnest_backbone",
    "build_resnet_backbone",
    "build_resnext_backbone",
    "build_shufflenetv2_backbone",
    "build_vit_backbone",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return functools.partial(BACKBONE_REGISTRY.build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
