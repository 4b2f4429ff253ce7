"""Supervised contrastive loss over the pairs of a batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY

KEYS = (
    Key("MODEL.LOSSES.SUPCON.TEMPERATURE", 0.1, "Supervised contrastive loss: cosines are divided by it.", above=0),
    Key("MODEL.LOSSES.SUPCON.SCALE", 1.0, "Supervised contrastive loss: weight in the sum.", low=0),
)


@force_fp32
def supcon_loss(features: torch.Tensor, targets: torch.Tensor, *, temperature: float = 0.1) -> torch.Tensor:
    """Return the supervised contrastive loss of a batch (Khosla et al. 2020, arXiv:2004.11362, eq. 2).

    With cosines c, anchor i's loss is the mean over its positives p of -log(exp(c_ip / T) / sum_a exp(c_ia / T)),
    where a is every other image of the batch. Differs: the mean over the anchors that have a positive instead of the
    sum, and one view of each image, the other images of its identity being the positives.

    Args:
        features: (B, D) float; their cosine similarities are used.
        targets: (B,) int64 identities.
        temperature: T, more than 0.

    Returns:
        () float32; 0 where no anchor has a positive.
    """
    normalized = F.normalize(features, dim=1)
    diagonal = torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    positive = (targets[:, None] == targets[None, :]) & ~diagonal
    # Not minus infinity: of an image alone in its batch nothing would be left, and the gradient be NaN.
    logits = (normalized @ normalized.t() / temperature).masked_fill(diagonal, torch.finfo(normalized.dtype).min / 2)
    losses = -F.log_softmax(logits, dim=1).masked_fill(~positive, 0)
    counts = positive.sum(1)
    return (losses.sum(1) / counts.clamp_min(1)).sum() / (counts > 0).sum().clamp_min(1)


@LOSS_REGISTRY.register()
class SupConLoss(nn.Module):
    """``supcon_loss`` of a head's ``features``.

    Args:
        temperature: see ``supcon_loss``.
        scale: weight of this loss in the sum.
    """

    loss_name = "loss_supcon"
    over_pairs = True

    def __init__(self, *, temperature: float = 0.1, scale: float = 1.0) -> None:
        super().__init__()
        self.temperature, self.scale = temperature, scale

    @classmethod
    def from_config(cls, cfg: Any) -> "SupConLoss":
        """Return the loss of ``MODEL.LOSSES.SUPCON``."""
        supcon = cfg.MODEL.LOSSES.SUPCON
        return cls(temperature=supcon.TEMPERATURE, scale=supcon.SCALE)

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * supcon_loss(outputs["features"], targets, temperature=self.temperature)
