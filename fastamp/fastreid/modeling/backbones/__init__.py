"""Registry of backbones, and FastReID's functions ``build_<name>_backbone(cfg)``."""

import functools
from typing import Any

from fastamp.modeling.backbones import BACKBONE_REGISTRY, build_backbone

__all__ = [
    "BACKBONE_REGISTRY",
    "build_backbone",
    *(name for name in BACKBONE_REGISTRY if name.startswith("build_") and name.endswith("_backbone")),
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return functools.partial(BACKBONE_REGISTRY.build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
