"""Components of models, with FastReID's constructors."""

from fastamp.fastreid.modeling.meta_arch import META_ARCH_REGISTRY, build_model

__all__ = ["META_ARCH_REGISTRY", "build_model"]
