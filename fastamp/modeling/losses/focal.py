"""Focal loss over identities."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY

KEYS = (
    Key("MODEL.LOSSES.FL.ALPHA", 0.25, "Focal loss: factor that balances the classes.", above=0),
    Key("MODEL.LOSSES.FL.GAMMA", 2, "Focal loss: exponent that turns the weight away from easy samples.", low=0),
    Key("MODEL.LOSSES.FL.SCALE", 1.0, "Focal loss: weight in the sum.", low=0),
)


@force_fp32
def focal_loss(logits: torch.Tensor, targets: torch.Tensor, *, alpha: float = 0.25, gamma: float = 2.0) -> torch.Tensor:
    """Return the mean of -alpha (1 - p)^gamma log p (Lin et al. 2017, arXiv:1708.02002, eq. 5).

    p is the probability of the right class in a softmax over all.

    Args:
        logits: (B, K) float.
        targets: (B,) int64 in 0..K-1.
        alpha: factor.
        gamma: at least 0; the larger, the less easy samples count.

    Returns:
        () float32.
    """
    right = F.log_softmax(logits, dim=1).gather(1, targets[:, None]).squeeze(1)
    # 1 - p from log p without cancellation; not exactly 0, where the power's gradient may be infinite.
    wrong = (-torch.expm1(right)).clamp_min(torch.finfo(right.dtype).tiny)
    return (-alpha * wrong.pow(gamma) * right).mean()


@LOSS_REGISTRY.register()
class FocalLoss(nn.Module):
    """``focal_loss`` of a head's ``cls_outputs``.

    Args:
        alpha, gamma: see ``focal_loss``.
        scale: weight of this loss in the sum.
    """

    loss_name = "loss_focal"

    def __init__(self, *, alpha: float = 0.25, gamma: float = 2.0, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.gamma, self.scale = alpha, gamma, scale

    @classmethod
    def from_config(cls, cfg: Any) -> "FocalLoss":
        """Return the loss of ``MODEL.LOSSES.FL``."""
        fl = cfg.MODEL.LOSSES.FL
        return cls(alpha=fl.ALPHA, gamma=fl.GAMMA, scale=fl.SCALE)

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * focal_loss(outputs["cls_outputs"], targets, alpha=self.alpha, gamma=self.gamma)
