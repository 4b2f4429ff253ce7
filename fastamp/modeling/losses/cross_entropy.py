"""Cross entropy over identities, with FastReID's label smoothing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY

KEYS = (
    Key(
        "MODEL.LOSSES.CE.EPSILON",
        0.0,
        "Cross entropy: label smoothing, the probability spread over the wrong classes; "
        "below 0 it follows the model's confidence (see ALPHA).",
        high=1,
    ),
    Key(
        "MODEL.LOSSES.CE.ALPHA", 0.2, "Cross entropy: adaptive smoothing is ALPHA times the right class's probability."
    ),
    Key("MODEL.LOSSES.CE.SCALE", 1.0, "Cross entropy: weight in the sum.", low=0),
)


@force_fp32
def cross_entropy_total(
    logits: torch.Tensor, targets: torch.Tensor, *, epsilon: float = 0.0, alpha: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the cross entropies with smoothed labels, and how many of them are not zero.

    Differs from PyTorch's label smoothing: the right class gets 1 - eps and each of the K - 1 others eps / (K - 1),
    where PyTorch spreads eps over all K.

    Args:
        logits: (B, K) float.
        targets: (B,) int64 in 0..K-1.
        epsilon: eps; below 0 it is adaptive, ``alpha`` times the predicted probability of the right class.
        alpha: of the adaptive form.

    Returns:
        () float32, () int64.
    """
    log_probabilities = F.log_softmax(logits, dim=1)
    right = log_probabilities.gather(1, targets[:, None]).squeeze(1)
    eps = alpha * right.detach().exp() if epsilon < 0 else epsilon
    # With one class alone nothing is left to smooth over.
    wrong = (log_probabilities.sum(1) - right) / max(logits.shape[1] - 1, 1)
    losses = -((1 - eps) * right + eps * wrong)
    return losses.sum(), torch.count_nonzero(losses.detach())


def cross_entropy_loss(
    logits: torch.Tensor, targets: torch.Tensor, *, epsilon: float = 0.0, alpha: float = 0.2
) -> torch.Tensor:
    """Return the cross entropy with smoothed labels, averaged over the samples whose loss is not zero.

    Args:
        logits, targets, epsilon, alpha: see ``cross_entropy_total``.

    Returns:
        () float32.
    """
    total, count = cross_entropy_total(logits, targets, epsilon=epsilon, alpha=alpha)
    return total / count.clamp(min=1)


@LOSS_REGISTRY.register()
class CrossEntropyLoss(nn.Module):
    """``cross_entropy_loss`` of a head's ``cls_outputs``.

    Args:
        epsilon, alpha: see ``cross_entropy_total``.
        scale: weight of this loss in the sum.
    """

    loss_name = "loss_cls"

    def __init__(self, *, epsilon: float = 0.0, alpha: float = 0.2, scale: float = 1.0) -> None:
        super().__init__()
        self.epsilon, self.alpha, self.scale = epsilon, alpha, scale

    @classmethod
    def from_config(cls, cfg: Any) -> "CrossEntropyLoss":
        """Return the loss of ``MODEL.LOSSES.CE``."""
        ce = cfg.MODEL.LOSSES.CE
        return cls(epsilon=ce.EPSILON, alpha=ce.ALPHA, scale=ce.SCALE)

    def total_and_count(
        self, outputs: dict[str, torch.Tensor], targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss's numerator and denominator, () each, of which several processes make one mean."""
        total, count = cross_entropy_total(outputs["cls_outputs"], targets, epsilon=self.epsilon, alpha=self.alpha)
        return self.scale * total, count

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        total, count = self.total_and_count(outputs, targets)
        return total / count.clamp(min=1)
