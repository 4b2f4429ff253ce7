"""Focal loss."""

import torch

from fastamp.modeling.losses import focal


def focal_loss(input: torch.Tensor, target: torch.Tensor, alpha: float, gamma: float = 2.0) -> torch.Tensor:
    """Compute the mean focal loss; see ``fastamp.modeling.losses.focal_loss``."""
    return focal.focal_loss(input, target, alpha, gamma)
