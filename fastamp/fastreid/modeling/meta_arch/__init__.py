"""Registry of meta-architectures, and meta-architectures with FastReID's constructors."""

from fastamp.fastreid.modeling.meta_arch.baseline import Baseline
from fastamp.fastreid.modeling.meta_arch.build import META_ARCH_REGISTRY, build_model
from fastamp.fastreid.modeling.meta_arch.distiller import Distiller
from fastamp.fastreid.modeling.meta_arch.mgn import MGN
from fastamp.fastreid.modeling.meta_arch.moco import MoCo

__all__ = ["META_ARCH_REGISTRY", "MGN", "Baseline", "Distiller", "MoCo", "build_model"]
