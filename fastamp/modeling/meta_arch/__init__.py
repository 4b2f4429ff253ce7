"""Meta-architectures: a batch in, features or losses out."""

from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY, build_model

__all__ = ["META_ARCH_REGISTRY", "Baseline", "build_model"]
