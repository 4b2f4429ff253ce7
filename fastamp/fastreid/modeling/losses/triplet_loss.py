"""Triplet loss."""

import torch

from fastamp.modeling.losses import triplet


def triplet_loss(
    embedding: torch.Tensor, targets: torch.Tensor, margin: float, norm_feat: bool, hard_mining: bool
) -> torch.Tensor:
    """Compute the triplet loss; see ``fastamp.modeling.losses.triplet_loss``."""
    return triplet.triplet_loss(embedding, targets, margin, norm_feat, hard_mining)
