"""Weighted binary cross entropy over attributes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key

KEYS = (
    Key(
        "MODEL.LOSSES.BCE.WEIGHT_ENABLED",
        True,
        "FastAttr: weight positive labels by exp(1 - r) and negative ones by exp(r), where r is the fraction of "
        "positives of the attribute in the training set.",
    ),
    Key("MODEL.LOSSES.BCE.SCALE", 1.0, "FastAttr: weight of the binary cross entropy in the total loss.", low=0),
)


@force_fp32
def binary_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, positive_rates: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the weighted binary cross entropy (Li et al. 2015, "Multi-attribute learning for pedestrian attribute
    recognition in surveillance scenarios", with the weights of FastReID).

    As in FastReID, the sum is divided by the number of losses that are not exactly 0, instead of by the number of
    labels: labels below a logit of about -16.7 do not count.

    Args:
        logits: (B, A) float.
        labels: (B, A) float: positive above 0.5; NaN for missing labels, which do not count.
        positive_rates: (A,) fraction of positives of each attribute, in 0..1. Default None: no weights.

    Returns:
        Scalar float32.
    """
    known = ~labels.isnan()
    labels = torch.where(known, labels, 0.0)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * known
    if positive_rates is not None:
        losses = losses * torch.where(labels > 0.5, (1 - positive_rates).exp(), positive_rates.exp())
    return losses.sum() / torch.count_nonzero(losses.detach()).clamp(min=1)


class BinaryCrossEntropyLoss(nn.Module):
    """Loss ``BinaryCrossEntropyLoss`` of the attribute models; see ``binary_cross_entropy``.

    Args:
        num_attributes: number of attributes A.
        weighted: weight labels by the fractions of positives, see ``set_positive_rates``. Default True.
        scale: weight in the total loss. Default 1.
    """

    def __init__(self, *, num_attributes: int, weighted: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.weighted, self.scale = weighted, scale
        # Stored, so that a resumed run does not depend on reading the training set in the same way.
        self.register_buffer("positive_rates", torch.full((num_attributes,), 0.5))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "BinaryCrossEntropyLoss":
        """Build the loss from ``MODEL.LOSSES.BCE``."""
        bce = cfg.MODEL.LOSSES.BCE
        return cls(num_attributes=len(cfg.MODEL.ATTRIBUTES.NAMES), weighted=bce.WEIGHT_ENABLED, scale=bce.SCALE)

    def set_positive_rates(self, rates: Sequence[float] | torch.Tensor) -> None:
        """Set the fraction of positives of each attribute in the training set, (A,) in 0..1."""
        self.positive_rates.copy_(torch.as_tensor(rates, dtype=torch.float32))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of logits and labels, both (B, A); a scalar float32."""
        return self.scale * binary_cross_entropy(logits, labels, self.positive_rates if self.weighted else None)
