"""Supervised contrastive loss."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, ConfiguredLoss

KEYS = (
    Key(
        "MODEL.LOSSES.SUPCON.TEMPERATURE",
        0.1,
        "Supervised contrastive loss: divisor of the cosine similarities.",
        above=0,
    ),
    Key("MODEL.LOSSES.SUPCON.SCALE", 1.0, "Supervised contrastive loss: weight in the total loss.", low=0),
)


@force_fp32
def supcon_loss(features: torch.Tensor, targets: torch.Tensor, *, temperature: float = 0.1) -> torch.Tensor:
    """Compute the supervised contrastive loss of a batch (Khosla et al. 2020, arXiv:2004.11362, eq. 2).

    The loss of anchor i is the mean over its positives p of -log(exp(c_ip / T) / sum_a exp(c_ia / T)), where c are
    cosine similarities and a runs over all other images of the batch. Differs from the paper: the loss is averaged, not
    summed, over the anchors that have a positive; there is one view per image, so the positives of an anchor are the
    other images of its identity.

    Args:
        features: (B, D) float; the loss uses their cosine similarities.
        targets: (B,) int64 class labels.
        temperature: T, greater than 0. Default 0.1.

    Returns:
        Scalar float32; 0 if no anchor has a positive.
    """
    normalized = F.normalize(features, dim=1)
    diagonal = torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    positive = (targets[:, None] == targets[None, :]) & ~diagonal
    # Not minus infinity: with a single image in the batch, the softmax and its gradient would be NaN.
    logits = (normalized @ normalized.t() / temperature).masked_fill(diagonal, torch.finfo(normalized.dtype).min / 2)
    losses = -F.log_softmax(logits, dim=1).masked_fill(~positive, 0)
    counts = positive.sum(1)
    return (losses.sum(1) / counts.clamp_min(1)).sum() / (counts > 0).sum().clamp_min(1)


@LOSS_REGISTRY.register()
class SupConLoss(ConfiguredLoss):
    """Supervised contrastive loss of the ``features`` of a head; see ``supcon_loss``.

    Args:
        temperature: see ``supcon_loss``.
        scale: weight of this loss in the total loss.
    """

    loss_name = "loss_supcon"
    section = "SUPCON"
    over_pairs = True

    def __init__(self, *, temperature: float = 0.1, scale: float = 1.0) -> None:
        super().__init__()
        self.temperature, self.scale = temperature, scale

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * supcon_loss(outputs["features"], targets, temperature=self.temperature)
