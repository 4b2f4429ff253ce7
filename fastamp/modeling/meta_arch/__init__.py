"""Meta-architectures, which map a batch to features or losses."""

from fastamp.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY, adapt_to_training_set, build_model
from fastamp.modeling.meta_arch.distiller import Distiller
from fastamp.modeling.meta_arch.lightmbn import LightMBN
from fastamp.modeling.meta_arch.mgn import MGN
from fastamp.modeling.meta_arch.moco import MoCo

__all__ = [
    "META_ARCH_REGISTRY",
    "MGN",
    "Baseline",
    "Distiller",
    "LightMBN",
    "MoCo",
    "adapt_to_training_set",
    "build_model",
]
