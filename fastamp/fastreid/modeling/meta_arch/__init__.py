"""Registry of meta-architectures, and meta-architectures with FastReID's constructors."""

from fastamp.fastreid.modeling.meta_arch.baseline import Baseline
from fastamp.fastreid.modeling.meta_arch.distiller import Distiller
from fastamp.modeling.meta_arch import MGN, MoCo
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY, build_model

__all__ = ["META_ARCH_REGISTRY", "MGN", "Baseline", "Distiller", "MoCo", "build_model"]
