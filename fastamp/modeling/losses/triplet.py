"""Triplet loss with mining in the batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.layers.distance import pairwise_distance, squared_euclidean_distance
from fastamp.modeling.losses.build import LOSS_REGISTRY
from fastamp.utils.errors import check_choice

KEYS = (
    Key(
        "MODEL.LOSSES.TRI.MARGIN",
        0.3,
        "Triplet loss: distance by which a negative must be farther; 0 is a soft margin.",
        low=0,
    ),
    Key("MODEL.LOSSES.TRI.NORM_FEAT", False, "Triplet loss: on L2-normalized features."),
    Key(
        "MODEL.LOSSES.TRI.HARD_MINING",
        False,
        "Triplet loss: the hardest positive and negative of each anchor; off weighs "
        "all of them by the softmax of their distances.",
    ),
    Key(
        "MODEL.LOSSES.TRI.WEIGHTING",
        "softmax",
        "Triplet loss without HARD_MINING: a softmax over the distances (Ye et al. 2020, arXiv:2001.04193), or "
        "FastReID's form of it, whose weighted negative distance is wrong beyond distances of about 14 and falls to 0.",
        choices=("softmax", "fastreid"),
    ),
    Key("MODEL.LOSSES.TRI.SCALE", 1.0, "Triplet loss: weight in the sum.", low=0),
)

WEIGHTINGS = ("softmax", "fastreid")
# Distance of the negatives of an anchor that has none: beyond every margin, so that its loss is 0.
_NO_NEGATIVE = 1e9


def _hardest(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each anchor's farthest positive and nearest negative: (B,), (B,)."""
    farthest = distances.masked_fill(~positive, 0).amax(1)
    nearest = distances.masked_fill(positive, _NO_NEGATIVE).amin(1)
    return farthest, nearest


def _softmax_weighted(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each anchor's softmax-weighted positive and negative distance: (B,), (B,).

    The weights are a softmax of d over the positives and of -d over the negatives (Ye et al. 2020, arXiv:2001.04193,
    weighted regularization triplet). An anchor is one of its own positives, at distance 0.
    """

    def weighted(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Not minus infinity: a row without any True would become NaN.
        weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min / 2).softmax(1)
        return (distances * weights * mask).sum(1)

    to_negative = weighted(-distances, ~positive)
    return weighted(distances, positive), to_negative.masked_fill(positive.all(1), _NO_NEGATIVE)


def _fastreid_weighted(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what FastReID computes instead of ``_softmax_weighted``: (B,), (B,).

    Its largest value is taken over products with the mask, whose zeros exceed every -d, so nothing is subtracted for
    negatives, and 1e-6 is added to the divisor. Beyond distances of about 14 (exp(-14) = 8e-7) the weights no longer
    sum to 1, and the weighted negative distance falls to 0 as the distances grow.
    """

    def weighted(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        largest = (logits * mask).amax(1, keepdim=True)
        # Differs: masked before the exponential. FastReID's is NaN where it overflows outside of the mask.
        exponentials = (logits - largest).masked_fill(~mask, -torch.inf).exp()
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
    weighting: str = "softmax",
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
        weighting: without hard mining, ``"softmax"``, or ``"fastreid"`` for FastReID's form of it, which is wrong
            for distances beyond about 14 (see ``_fastreid_weighted``). Default ``"softmax"``.

    Returns:
        () float32.

    Raises:
        ConfigError: another weighting.
    """
    check_choice("MODEL.LOSSES.TRI.WEIGHTING", weighting, WEIGHTINGS)
    if normalize:
        unit = F.normalize(features, dim=1)
        distances = squared_euclidean_distance(unit, unit)
    else:
        distances = pairwise_distance(features, features)
    positive = targets[:, None] == targets[None, :]
    if hard_mining:
        mining = _hardest
    else:
        mining = _softmax_weighted if weighting == "softmax" else _fastreid_weighted
    to_positive, to_negative = mining(distances, positive)
    if margin > 0:
        return F.relu(to_positive - to_negative + margin).mean()
    return F.softplus(to_positive - to_negative).mean()


@LOSS_REGISTRY.register()
class TripletLoss(nn.Module):
    """``triplet_loss`` of a head's ``features``.

    Args:
        margin, normalize, hard_mining, weighting: see ``triplet_loss``.
        scale: weight of this loss in the sum.
    """

    loss_name = "loss_triplet"
    over_pairs = True

    def __init__(
        self,
        *,
        margin: float = 0.3,
        normalize: bool = False,
        hard_mining: bool = True,
        weighting: str = "softmax",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.margin, self.normalize, self.hard_mining = margin, normalize, hard_mining
        self.weighting, self.scale = weighting, scale

    @classmethod
    def from_config(cls, cfg: Any) -> "TripletLoss":
        """Return the loss of ``MODEL.LOSSES.TRI``."""
        tri = cfg.MODEL.LOSSES.TRI
        return cls(
            margin=tri.MARGIN,
            normalize=tri.NORM_FEAT,
            hard_mining=tri.HARD_MINING,
            weighting=tri.WEIGHTING,
            scale=tri.SCALE,
        )

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * triplet_loss(
            outputs["features"],
            targets,
            margin=self.margin,
            normalize=self.normalize,
            hard_mining=self.hard_mining,
            weighting=self.weighting,
        )
