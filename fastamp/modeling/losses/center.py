"""Center loss: each identity's features are drawn to a center that is learned."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, feature_dim

KEYS = (
    Key("MODEL.LOSSES.CENTER.SCALE", 0.0005, "Center loss: weight in the sum.", low=0),
    Key(
        "MODEL.LOSSES.CENTER.LR",
        0.5,
        "Center loss: learning rate of the centers, which have an SGD of their own.",
        low=0,
    ),
)


@force_fp32
def center_loss(features: torch.Tensor, targets: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance of features from the centers of their identities.

    Wen et al. 2016, "A Discriminative Feature Learning Approach for Deep Face Recognition", eq. 2; differs: the mean
    over the batch, without the factor 1/2, as in the strong ReID baseline (Luo et al. 2019, arXiv:1903.07071).

    Args:
        features: (B, D) float.
        targets: (B,) int64 in 0..K-1.
        centers: (K, D) float32.

    Returns:
        () float32.
    """
    return (features - centers[targets]).square().sum(1).mean()


@LOSS_REGISTRY.register()
class CenterLoss(nn.Module):
    """``center_loss`` of a head's ``features``, with an SGD of its own for the centers.

    Args:
        num_classes: identities in the training set.
        feature_dim: D of the features.
        scale: weight of this loss in the sum.
        lr: learning rate of the centers; it is constant.
    """

    loss_name = "loss_center"
    classifiers = ("centers",)

    def __init__(self, *, num_classes: int, feature_dim: int, scale: float = 0.0005, lr: float = 0.5) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, feature_dim))
        self.scale, self.lr = scale, lr

    @classmethod
    def from_config(cls, cfg: Any) -> "CenterLoss":
        """Return the loss of ``MODEL.LOSSES.CENTER``."""
        center = cfg.MODEL.LOSSES.CENTER
        return cls(
            num_classes=cfg.MODEL.HEADS.NUM_CLASSES,
            feature_dim=feature_dim(cfg),
            scale=center.SCALE,
            lr=center.LR,
        )

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the SGD of the centers, whose steps do not depend on the weight of the loss."""
        return torch.optim.SGD([{"params": [self.centers], "scheduled": False}], lr=self.lr / (self.scale or 1.0))

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * center_loss(outputs["features"], targets, self.centers)
