"""Triplet loss with mining in the batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers.distance import pairwise_distance, squared_euclidean_distance
from fastamp.modeling.losses.build import LOSS_REGISTRY


def _hardest(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each anchor's farthest positive and nearest negative: (B,), (B,)."""
    farthest = distances.masked_fill(~positive, 0).amax(1)
    # An anchor without any negative gets a distance beyond every margin, so that its loss is 0.
    nearest = (distances + positive * 1e9).amin(1)
    return farthest, nearest


def _softmax_weighted(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each anchor's softmax-weighted positive and negative distance: (B,), (B,) (Ristani & Tomasi 2018)."""

    def weighted(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Subtracting the largest masked value keeps exp() finite; the 1e-6 is FastReID's.
        largest = (logits * mask).amax(1, keepdim=True)
        exponentials = (logits - largest).exp() * mask
        return (distances * exponentials / (exponentials.sum(1, keepdim=True) + 1e-6)).sum(1)

    return weighted(distances, positive), weighted(-distances, ~positive)


@force_fp32
def triplet_loss(
    features: torch.Tensor,
    targets: torch.Tensor,
    *,
    margin: float = 0.3,
    normalize: bool = False,
    hard_mining: bool = True,
) -> torch.Tensor:
    """Return the mean triplet loss over all anchors of a batch (Hermans et al. 2017, arXiv:1703.07737, eq. 5).

    Args:
        features: (B, D) float.
        targets: (B,) int64 identities.
        margin: in units of the distance; 0 means the soft margin, log(1 + exp(d_ap - d_an)).
        normalize: use the squared Euclidean distance of L2-normalized features instead of the Euclidean
            distance of the features as they are.
        hard_mining: the farthest positive and the nearest negative; otherwise all positives and all negatives,
            weighted by a softmax over their distances.

    Returns:
        () float32.
    """
    if normalize:
        unit = F.normalize(features, dim=1)
        distances = squared_euclidean_distance(unit, unit)
    else:
        distances = pairwise_distance(features, features)
    positive = targets[:, None] == targets[None, :]
    mine = _hardest if hard_mining else _softmax_weighted
    to_positive, to_negative = mine(distances, positive)
    if margin > 0:
        return F.relu(to_positive - to_negative + margin).mean()
    return F.softplus(to_positive - to_negative).mean()


@LOSS_REGISTRY.register()
class TripletLoss(nn.Module):
    """``triplet_loss`` of a head's ``features``.

    Args:
        margin, normalize, hard_mining: see ``triplet_loss``.
        scale: weight of this loss in the sum.
    """

    loss_name = "loss_triplet"
    over_pairs = True

    def __init__(
        self, *, margin: float = 0.3, normalize: bool = False, hard_mining: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.margin, self.normalize, self.hard_mining, self.scale = margin, normalize, hard_mining, scale

    @classmethod
    def from_config(cls, cfg: Any) -> "TripletLoss":
        """Return the loss of ``MODEL.LOSSES.TRI``."""
        tri = cfg.MODEL.LOSSES.TRI
        return cls(margin=tri.MARGIN, normalize=tri.NORM_FEAT, hard_mining=tri.HARD_MINING, scale=tri.SCALE)

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * triplet_loss(
            outputs["features"],
            targets,
            margin=self.margin,
            normalize=self.normalize,
            hard_mining=self.hard_mining,
        )
