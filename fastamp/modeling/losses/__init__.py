"""Losses, computed in float32 from the outputs of a head."""

from fastamp.modeling.losses.build import LOSS_REGISTRY, build_losses
from fastamp.modeling.losses.center import CenterLoss, center_loss
from fastamp.modeling.losses.clothes import ClothesAdversarialLoss, clothes_adversarial_loss
from fastamp.modeling.losses.cross_entropy import CrossEntropyLoss, cross_entropy_loss
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.modeling.losses.focal import FocalLoss, focal_loss
from fastamp.modeling.losses.pairwise_cosine import CircleLoss, Cosface, pairwise_circle_loss, pairwise_cosface
from fastamp.modeling.losses.pml import PMLLoss
from fastamp.modeling.losses.supcon import SupConLoss, supcon_loss
from fastamp.modeling.losses.triplet import TripletLoss, triplet_loss

__all__ = [
    "LOSS_REGISTRY",
    "CenterLoss",
    "CircleLoss",
    "ClothesAdversarialLoss",
    "Cosface",
    "CrossEntropyLoss",
    "FocalLoss",
    "PMLLoss",
    "SupConLoss",
    "TripletLoss",
    "build_losses",
    "center_loss",
    "clothes_adversarial_loss",
    "cross_entropy_loss",
    "distillation_loss",
    "focal_loss",
    "pairwise_circle_loss",
    "pairwise_cosface",
    "supcon_loss",
    "triplet_loss",
]
