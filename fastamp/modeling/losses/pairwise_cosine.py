"""Losses over the cosine similarities of all pairs in a batch: Circle loss and pairwise CosFace."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY

KEYS = (
    Key("MODEL.LOSSES.CIRCLE.MARGIN", 0.25, "Circle loss: relaxation of the cosine similarities.", low=0),
    Key("MODEL.LOSSES.CIRCLE.GAMMA", 128, "Circle loss: factor on the similarities.", above=0),
    Key("MODEL.LOSSES.CIRCLE.SCALE", 1.0, "Circle loss: weight in the sum.", low=0),
    Key("MODEL.LOSSES.COSFACE.MARGIN", 0.25, "Pairwise CosFace: margin on the cosine similarities.", low=0),
    Key("MODEL.LOSSES.COSFACE.GAMMA", 128, "Pairwise CosFace: factor on the similarities.", above=0),
    Key("MODEL.LOSSES.COSFACE.SCALE", 1.0, "Pairwise CosFace: weight in the sum.", low=0),
)

_EXCLUDED = -1e8


def _pair_masks(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which pairs are of one identity, each image with itself left out, and which of two: (B, B) bool each."""
    same = targets[:, None] == targets[None, :]
    diagonal = torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    return same & ~diagonal, ~same


def log_sum_exp_loss(
    positive_logits: torch.Tensor, negative_logits: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
) -> torch.Tensor:
    """Return the mean over rows of log(1 + sum over positives of exp() * sum over negatives of exp()).

    A row without a positive, or without a negative, counts as 0.
    """
    positives = positive_logits.masked_fill(~positive, _EXCLUDED).logsumexp(1)
    negatives = negative_logits.masked_fill(~negative, _EXCLUDED).logsumexp(1)
    return F.softplus(positives + negatives).mean()


@force_fp32
def pairwise_circle_loss(
    features: torch.Tensor, targets: torch.Tensor, *, margin: float = 0.25, gamma: float = 128.0
) -> torch.Tensor:
    """Return the circle loss over the pairs of a batch (Sun et al. 2020, arXiv:2002.10857, eq. 6).

    Args:
        features: (B, D) float; their cosine similarities are used.
        targets: (B,) int64 identities.
        margin: relaxation m; the optimum is 1 - m for a positive and m for a negative pair.
        gamma: factor on the similarities.

    Returns:
        () float32.
    """
    normalized = F.normalize(features, dim=1)
    cosines = normalized @ normalized.t()
    weights = cosines.detach()
    positive_logits = -gamma * (1 + margin - weights).clamp_min(0) * (cosines - (1 - margin))
    negative_logits = gamma * (weights + margin).clamp_min(0) * (cosines - margin)
    return log_sum_exp_loss(positive_logits, negative_logits, *_pair_masks(targets))


@force_fp32
def pairwise_cosface(
    features: torch.Tensor, targets: torch.Tensor, *, margin: float = 0.25, gamma: float = 128.0
) -> torch.Tensor:
    """Return CosFace between the images of a batch instead of with class weights (Sun et al. 2020, eq. 1).

    Args:
        features: (B, D) float; their cosine similarities are used.
        targets: (B,) int64 identities.
        margin: a positive pair's similarity is to exceed a negative one's by this.
        gamma: factor on the similarities.

    Returns:
        () float32.
    """
    normalized = F.normalize(features, dim=1)
    cosines = normalized @ normalized.t()
    return log_sum_exp_loss(-gamma * cosines, gamma * (cosines + margin), *_pair_masks(targets))


class _PairwiseCosineLoss(nn.Module):
    """A loss of a head's ``features``.

    Args:
        margin, gamma: of the function.
        scale: weight of this loss in the sum.
    """

    over_pairs = True

    def __init__(self, *, margin: float = 0.25, gamma: float = 128.0, scale: float = 1.0) -> None:
        super().__init__()
        self.margin, self.gamma, self.scale = margin, gamma, scale


@LOSS_REGISTRY.register()
class CircleLoss(_PairwiseCosineLoss):
    """``pairwise_circle_loss`` of a head's ``features``."""

    loss_name = "loss_circle"

    @classmethod
    def from_config(cls, cfg: Any) -> "CircleLoss":
        """Return the loss of ``MODEL.LOSSES.CIRCLE``."""
        circle = cfg.MODEL.LOSSES.CIRCLE
        return cls(margin=circle.MARGIN, gamma=circle.GAMMA, scale=circle.SCALE)

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * pairwise_circle_loss(outputs["features"], targets, margin=self.margin, gamma=self.gamma)


@LOSS_REGISTRY.register()
class Cosface(_PairwiseCosineLoss):
    """``pairwise_cosface`` of a head's ``features``."""

    loss_name = "loss_cosface"

    @classmethod
    def from_config(cls, cfg: Any) -> "Cosface":
        """Return the loss of ``MODEL.LOSSES.COSFACE``."""
        cosface = cfg.MODEL.LOSSES.COSFACE
        return cls(margin=cosface.MARGIN, gamma=cosface.GAMMA, scale=cosface.SCALE)

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * pairwise_cosface(outputs["features"], targets, margin=self.margin, gamma=self.gamma)
