"""Triplet loss with batch mining."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.layers.distance import pairwise_distance, squared_euclidean_distance
from fastamp.modeling.losses.build import LOSS_REGISTRY, ConfiguredLoss
from fastamp.utils.errors import check_choice

KEYS = (
    Key(
        "MODEL.LOSSES.TRI.MARGIN",
        0.3,
        "Triplet loss: margin between the distances to the negative and to the positive; 0 selects the soft margin.",
        low=0,
    ),
    Key("MODEL.LOSSES.TRI.NORM_FEAT", False, "Triplet loss: use L2-normalized features."),
    Key(
        "MODEL.LOSSES.TRI.HARD_MINING",
        False,
        "Triplet loss: use the hardest positive and negative of each anchor; if False, use all positives and "
        "negatives, weighted by their distances (see WEIGHTING).",
    ),
    Key(
        "MODEL.LOSSES.TRI.WEIGHTING",
        "softmax",
        "Weights of the triplet loss without HARD_MINING. softmax: softmax of the distances (Ye et al. 2020, "
        "arXiv:2001.04193). fastreid: FastReID's variant, which underestimates the weighted negative distance if "
        "distances exceed about 14.",
        choices=("softmax", "fastreid"),
    ),
    Key("MODEL.LOSSES.TRI.SCALE", 1.0, "Triplet loss: weight in the total loss.", low=0),
)

WEIGHTINGS = ("softmax", "fastreid")
# Negative distance of an anchor without negatives: larger than any margin, so that its loss is 0.
_NO_NEGATIVE = 1e9


def _hardest(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the distances from each anchor to the farthest positive and to the nearest negative, (B,) each."""
    farthest = distances.masked_fill(~positive, 0).amax(1)
    nearest = distances.masked_fill(positive, _NO_NEGATIVE).amin(1)
    return farthest, nearest


def _softmax_weighted(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the softmax-weighted positive and negative distances of each anchor, (B,) each.

    The weights are a softmax of d over the positives and of -d over the negatives (Ye et al. 2020, arXiv:2001.04193,
    weighted regularization triplet). The positives of an anchor include the anchor itself, at distance 0.
    """

    def weighted(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Not minus infinity: rows without any True would be NaN.
        weights = logits.masked_fill(~mask, torch.finfo(logits.dtype).min / 2).softmax(1)
        return (distances * weights * mask).sum(1)

    to_negative = weighted(-distances, ~positive)
    return weighted(distances, positive), to_negative.masked_fill(positive.all(1), _NO_NEGATIVE)


def _fastreid_weighted(distances: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute FastReID's variant of ``_softmax_weighted``, (B,) each.

    FastReID's softmax subtracts the maximum of the masked logits. For negatives, this maximum is 0, the value of masked
    entries, since the logits -d are not positive. FastReID also adds 1e-6 to the denominator. For distances above about
    14 (exp(-14) = 8e-7) the weights do not sum to 1, and the weighted negative distance decreases to 0 with growing
    distances.
    """

    def weighted(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        largest = (logits * mask).amax(1, keepdim=True)
        # Differs: the mask is applied before the exponential. FastReID's overflows to NaN outside of the mask.
        exponentials = (logits - largest).masked_fill(~mask, -torch.inf).exp()
        return (distances * exponentials / (exponentials.sum(1, keepdim=True) + 1e-6)).sum(1)

    return weighted(distances, positive), weighted(-distances, ~positive)


@force_fp32
def triplet_loss(
    features: torch.Tensor,
    targets: torch.Tensor,
    margin: float = 0.3,
    normalize: bool = False,
    hard_mining: bool = True,
    weighting: str = "softmax",
) -> torch.Tensor:
    """Compute the mean triplet loss over all anchors of a batch (Hermans et al. 2017, arXiv:1703.07737, eq. 5).

    Args:
        features: (B, D) float.
        targets: (B,) int64 class labels.
        margin: triplet margin, in units of the distance; 0 selects the soft margin log(1 + exp(d_ap - d_an)). Default
            0.3.
        normalize: use squared Euclidean distances of L2-normalized features instead of Euclidean distances of the
            unnormalized features. Default False.
        hard_mining: use the farthest positive and the nearest negative of each anchor. If False, use all positives and
            negatives, weighted by a softmax of their distances. Default True.
        weighting: weights without hard mining: ``"softmax"``, or ``"fastreid"`` for FastReID's variant, which is wrong
            for distances above about 14 (see ``_fastreid_weighted``). Default ``"softmax"``.

    Returns:
        Scalar float32.

    Raises:
        ConfigError: if ``weighting`` is unknown.
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
class TripletLoss(ConfiguredLoss):
    """Triplet loss of the ``features`` of a head; see ``triplet_loss``.

    Args:
        margin, hard_mining, weighting: see ``triplet_loss``.
        norm_feat: ``normalize`` of ``triplet_loss``.
        scale: weight of this loss in the total loss.
    """

    loss_name = "loss_triplet"
    section = "TRI"
    over_pairs = True

    def __init__(
        self,
        *,
        margin: float = 0.3,
        norm_feat: bool = False,
        hard_mining: bool = True,
        weighting: str = "softmax",
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.margin, self.normalize, self.hard_mining = margin, norm_feat, hard_mining
        self.weighting, self.scale = weighting, scale

    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return self.scale * triplet_loss(
            outputs["features"],
            targets,
            margin=self.margin,
            normalize=self.normalize,
            hard_mining=self.hard_mining,
            weighting=self.weighting,
        )
