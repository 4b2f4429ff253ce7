"""Center loss, which pulls each feature toward the learned center of the identity."""

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.modeling.losses.build import LOSS_REGISTRY, feature_dim

KEYS = (
    Key("MODEL.LOSSES.CENTER.SCALE", 0.0005, "Center loss: weight in the total loss.", low=0),
    Key(
        "MODEL.LOSSES.CENTER.LR",
        0.5,
        "Center loss: learning rate of the separate SGD optimizer for the centers.",
        low=0,
    ),
)


@force_fp32
def center_loss(features: torch.Tensor, targets: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Compute the mean squared distance between the features and the centers of their identities.

    Wen et al. 2016, "A Discriminative Feature Learning Approach for Deep Face Recognition", eq. 2. Differs from the
    paper: mean over the batch and no factor 1/2, as in the strong ReID baseline (Luo et al. 2019, arXiv:1903.07071).

    Args:
        features: (B, D) float.
        targets: (B,) int64 class labels in 0..K-1.
        centers: (K, D) float32.

    Returns:
        Scalar float32.
    """
    return (features - centers[targets]).square().sum(1).mean()


@LOSS_REGISTRY.register()
class CenterLoss(nn.Module):
    """Center loss of the ``features`` of a head, with a separate SGD optimizer for the centers.

    Args:
        num_classes: number of identities in the training set.
        feature_dim: width of the features.
        scale: weight of this loss in the total loss.
        lr: constant learning rate of the centers.
    """

    loss_name = "loss_center"
    indexes_classes = True
    classifiers = ("centers",)
    sparse_gradients = True  # only the centers of the identities in a batch get one

    def __init__(self, *, num_classes: int, feature_dim: int, scale: float = 0.0005, lr: float = 0.5) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, feature_dim))
        self.scale, self.lr = scale, lr

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "CenterLoss":
        """Build the loss configured in ``MODEL.LOSSES.CENTER``."""
        center = cfg.MODEL.LOSSES.CENTER
        return cls(
            num_classes=cfg.MODEL.HEADS.NUM_CLASSES,
            feature_dim=feature_dim(cfg),
            scale=center.SCALE,
            lr=center.LR,
        )

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the SGD optimizer of the centers. The learning rate ``lr / scale`` cancels the weight of the loss."""
        return torch.optim.SGD([{"params": [self.centers], "scheduled": False}], lr=self.lr / (self.scale or 1.0))

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * center_loss(outputs["features"], targets, self.centers)
