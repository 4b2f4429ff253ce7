"""Losses over a head's outputs, each computed in float32."""

from fastamp.modeling.losses.build import LOSS_REGISTRY, build_losses
from fastamp.modeling.losses.cross_entropy import CrossEntropyLoss, cross_entropy_loss
from fastamp.modeling.losses.triplet import TripletLoss, triplet_loss

__all__ = ["LOSS_REGISTRY", "CrossEntropyLoss", "TripletLoss", "build_losses", "cross_entropy_loss", "triplet_loss"]
