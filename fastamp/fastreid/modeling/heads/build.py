"""Registry and builder of heads."""

from fastamp.modeling.heads.build import HEADS_REGISTRY as REID_HEADS_REGISTRY
from fastamp.modeling.heads.build import build_heads

__all__ = ["REID_HEADS_REGISTRY", "build_heads"]
