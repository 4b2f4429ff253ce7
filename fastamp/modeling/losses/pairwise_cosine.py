"""Circle loss and pairwise CosFace: losses over the cosine similarities of all pairs in a batch."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, ConfiguredLoss

KEYS = (
    Key("MODEL.LOSSES.CIRCLE.MARGIN", 0.25, "Circle loss: relaxation margin m of the cosine similarities.", low=0),
    Key("MODEL.LOSSES.CIRCLE.GAMMA", 128, "Circle loss: scale factor of the similarities.", above=0),
    Key("MODEL.LOSSES.CIRCLE.SCALE", 1.0, "Circle loss: weight in the total loss.", low=0),
    Key("MODEL.LOSSES.COSFACE.MARGIN", 0.25, "Pairwise CosFace: margin between positive and negative pairs.", low=0),
    Key("MODEL.LOSSES.COSFACE.GAMMA", 128, "Pairwise CosFace: scale factor of the similarities.", above=0),
    Key("MODEL.LOSSES.COSFACE.SCALE", 1.0, "Pairwise CosFace: weight in the total loss.", low=0),
)

_EXCLUDED = -1e8


def _pair_masks(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the masks of positive and negative pairs, (B, B) bool each; an image is not paired with itself."""
    same = targets[:, None] == targets[None, :]
    diagonal = torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    return same & ~diagonal, ~same


def log_sum_exp_loss(
    positive_logits: torch.Tensor, negative_logits: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
) -> torch.Tensor:
    """Compute the mean over rows of log(1 + sum of exp(positive logits) * sum of exp(negative logits)).

    Args:
        positive_logits, negative_logits: (B, N) float.
        positive, negative: (B, N) bool masks of the pairs.

    Returns:
        () float. A row without positive or without negative pairs contributes 0.
    """
    positives = positive_logits.masked_fill(~positive, _EXCLUDED).logsumexp(1)
    negatives = negative_logits.masked_fill(~negative, _EXCLUDED).logsumexp(1)
    return F.softplus(positives + negatives).mean()


@force_fp32
def pairwise_circle_loss(
    features: torch.Tensor, targets: torch.Tensor, margin: float = 0.25, gamma: float = 128.0
) -> torch.Tensor:
    """Compute the circle loss over the pairs of a batch (Sun et al. 2020, arXiv:2002.10857, eq. 6).

    Args:
        features: (B, D) float; the loss uses their cosine similarities.
        targets: (B,) int64 class labels.
        margin: relaxation m; the margins are 1 - m for positive and m for negative pairs. Default 0.25.
        gamma: scale factor of the similarities. Default 128.

    Returns:
        Scalar float32.
    """
    normalized = F.normalize(features, dim=1)
    cosines = normalized @ normalized.t()
    weights = cosines.detach()
    positive_logits = -gamma * (1 + margin - weights).clamp_min(0) * (cosines - (1 - margin))
    negative_logits = gamma * (weights + margin).clamp_min(0) * (cosines - margin)
    return log_sum_exp_loss(positive_logits, negative_logits, *_pair_masks(targets))


@force_fp32
def pairwise_cosface(
    features: torch.Tensor, targets: torch.Tensor, margin: float = 0.25, gamma: float = 128.0
) -> torch.Tensor:
    """Compute the CosFace loss over pairs of features (Sun et al. 2020, arXiv:2002.10857, eq. 1).

    In contrast to ``CosSoftmax``, the cosines are between two features, not between features and class weights.

    Args:
        features: (B, D) float; the loss uses their cosine similarities.
        targets: (B,) int64 class labels.
        margin: margin between the similarities of positive and negative pairs. Default 0.25.
        gamma: scale factor of the similarities. Default 128.

    Returns:
        Scalar float32.
    """
    normalized = F.normalize(features, dim=1)
    cosines = normalized @ normalized.t()
    return log_sum_exp_loss(-gamma * cosines, gamma * (cosines + margin), *_pair_masks(targets))


class _PairwiseCosineLoss(ConfiguredLoss):
    """Base class of losses over the cosine similarities of ``features``.

    Args:
        margin, gamma: see ``pairwise_circle_loss`` and ``pairwise_cosface``.
        scale: weight of this loss in the total loss.
    """

    over_pairs = True

    def __init__(self, *, margin: float = 0.25, gamma: float = 128.0, scale: float = 1.0) -> None:
        super().__init__()
        self.margin, self.gamma, self.scale = margin, gamma, scale


@LOSS_REGISTRY.register()
class CircleLoss(_PairwiseCosineLoss):
    """Circle loss of the ``features`` of a head; see ``pairwise_circle_loss``."""

    loss_name = "loss_circle"
    section = "CIRCLE"

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * pairwise_circle_loss(outputs["features"], targets, margin=self.margin, gamma=self.gamma)


@LOSS_REGISTRY.register()
class Cosface(_PairwiseCosineLoss):
    """Pairwise CosFace of the ``features`` of a head; see ``pairwise_cosface``."""

    loss_name = "loss_cosface"
    section = "COSFACE"

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * pairwise_cosface(outputs["features"], targets, margin=self.margin, gamma=self.gamma)
