"""Losses as functions, with FastReID's arguments."""

from fastamp.fastreid.modeling.losses.circle_loss import pairwise_circleloss, pairwise_cosface
from fastamp.fastreid.modeling.losses.cross_entroy_loss import cross_entropy_loss, log_accuracy
from fastamp.fastreid.modeling.losses.focal_loss import focal_loss
from fastamp.fastreid.modeling.losses.triplet_loss import triplet_loss

__all__ = [
    "cross_entropy_loss",
    "focal_loss",
    "log_accuracy",
    "pairwise_circleloss",
    "pairwise_cosface",
    "triplet_loss",
]
