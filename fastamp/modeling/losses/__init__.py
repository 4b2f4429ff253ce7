"""Losses, computed in float32 from the outputs of a head."""

from fastamp.modeling.losses import center, clothes, pml, supcon  # noqa: F401  register their losses
from fastamp.modeling.losses.build import LOSS_REGISTRY, build_losses
from fastamp.modeling.losses.cross_entropy import CrossEntropyLoss, cross_entropy_loss
from fastamp.modeling.losses.focal import focal_loss
from fastamp.modeling.losses.pairwise_cosine import pairwise_circle_loss, pairwise_cosface
from fastamp.modeling.losses.triplet import triplet_loss

__all__ = [
    "LOSS_REGISTRY",
    "CrossEntropyLoss",
    "build_losses",
    "cross_entropy_loss",
    "focal_loss",
    "pairwise_circle_loss",
    "pairwise_cosface",
    "triplet_loss",
]
