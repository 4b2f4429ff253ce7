"""Components of models: backbones, heads, losses and meta-architectures."""

from fastamp.modeling.backbones import BACKBONE_REGISTRY, build_backbone
from fastamp.modeling.heads import HEADS_REGISTRY, build_heads
from fastamp.modeling.load import LoadedModel, load_model
from fastamp.modeling.losses import LOSS_REGISTRY, build_losses
from fastamp.modeling.meta_arch import META_ARCH_REGISTRY, adapt_to_training_set, build_model

__all__ = [
    "BACKBONE_REGISTRY",
    "HEADS_REGISTRY",
    "LOSS_REGISTRY",
    "META_ARCH_REGISTRY",
    "LoadedModel",
    "adapt_to_training_set",
    "build_backbone",
    "build_heads",
    "build_losses",
    "build_model",
    "load_model",
]
