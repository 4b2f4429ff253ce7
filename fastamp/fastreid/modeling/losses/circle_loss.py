"""Losses over the cosine similarities of pairs."""

import torch

from fastamp.modeling.losses import pairwise_cosine


def pairwise_circleloss(embedding: torch.Tensor, targets: torch.Tensor, margin: float, gamma: float) -> torch.Tensor:
    """Compute the circle loss; see ``fastamp.modeling.losses.pairwise_circle_loss``."""
    return pairwise_cosine.pairwise_circle_loss(embedding, targets, margin, gamma)


def pairwise_cosface(embedding: torch.Tensor, targets: torch.Tensor, margin: float, gamma: float) -> torch.Tensor:
    """Compute the CosFace loss over pairs; see ``fastamp.modeling.losses.pairwise_cosface``."""
    return pairwise_cosine.pairwise_cosface(embedding, targets, margin, gamma)
