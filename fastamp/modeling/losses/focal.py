"""Focal loss over identities."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, ConfiguredLoss

KEYS = (
    Key("MODEL.LOSSES.FL.ALPHA", 0.25, "Focal loss: constant factor alpha.", above=0),
    Key(
        "MODEL.LOSSES.FL.GAMMA",
        2,
        "Focal loss: focusing parameter gamma; larger values reduce the weight of easy samples.",
        low=0,
    ),
    Key("MODEL.LOSSES.FL.SCALE", 1.0, "Focal loss: weight in the total loss.", low=0),
)


@force_fp32
def focal_loss(logits: torch.Tensor, targets: torch.Tensor, alpha: float = 0.25, gamma: float = 2.0) -> torch.Tensor:
    """Compute the mean of -alpha (1 - p)^gamma log p (Lin et al. 2017, arXiv:1708.02002, eq. 5).

    p is the softmax probability of the target class.

    Args:
        logits: (B, K) float.
        targets: (B,) int64 class labels in 0..K-1.
        alpha: constant factor. Default 0.25.
        gamma: focusing parameter, at least 0. Default 2.

    Returns:
        Scalar float32.
    """
    right = F.log_softmax(logits, dim=1).gather(1, targets[:, None]).squeeze(1)
    # expm1 avoids cancellation in 1 - p. The clamp avoids 0, where the gradient of the power can be infinite.
    wrong = (-torch.expm1(right)).clamp_min(torch.finfo(right.dtype).tiny)
    return (-alpha * wrong.pow(gamma) * right).mean()


@LOSS_REGISTRY.register()
class FocalLoss(ConfiguredLoss):
    """Focal loss of the ``cls_outputs`` of a head; see ``focal_loss``.

    Args:
        alpha, gamma: see ``focal_loss``.
        scale: weight of this loss in the total loss.
    """

    loss_name = "loss_focal"
    section = "FL"
    indexes_classes = True

    def __init__(self, *, alpha: float = 0.25, gamma: float = 2.0, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.gamma, self.scale = alpha, gamma, scale

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * focal_loss(outputs["cls_outputs"], targets, alpha=self.alpha, gamma=self.gamma)
