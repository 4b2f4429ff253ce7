"""Query-adaptive convolution (QAConv, Liao and Shao 2020, arXiv:1904.10424): matching of two feature maps."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.feature_pass import evaluation_mode
from fastamp.modeling.losses import LOSS_REGISTRY
from fastamp.utils.errors import ConfigError

KEYS = (Key("MODEL.LOSSES.MATCHING.SCALE", 1.0, "PairwiseMatchingLoss: weight in the total loss.", low=0),)
_BLOCK_BYTES = 64 * 2**20


class QAConv(nn.Module):
    """Score pairs of feature maps: for each place of both maps, the best match in the other map, weighted and summed.

    Args:
        places: number of places of a feature map, h * w.
    """

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places
        self.bn = nn.BatchNorm1d(1)
        self.fc = nn.Linear(places, 1)
        self.logit_bn = nn.BatchNorm1d(1)

    @force_fp32
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Score all pairs of (P, C, h, w) and (G, C, h, w) maps of unit length at each place: (P, G) float32.

        In training mode, both batch norms use the statistics of these pairs.
        """
        similarity = torch.einsum("pcr,gcs->pgrs", first.flatten(2), second.flatten(2))
        return self._score(torch.stack((similarity.amax(2), similarity.amax(3)), dim=2))

    @force_fp32
    def pairs(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Score each of (P, C, h, w) maps with its own (P, G, C, h, w) maps: (P, G) float32."""
        similarity = torch.einsum("pcr,pgcs->pgrs", first.flatten(2), second.flatten(3))
        return self._score(torch.stack((similarity.amax(2), similarity.amax(3)), dim=2))

    def _score(self, best: torch.Tensor) -> torch.Tensor:
        """Compute the scores from the best matches (P, G, 2, places) of both directions."""
        weighted = self.fc(self.bn(best.reshape(-1, 1, self.places)).view(-1, self.places))
        return self.logit_bn(weighted.view(-1, 2).sum(1, keepdim=True)).view(best.shape[:2])

    @torch.no_grad()
    def all_scores(self, maps: torch.Tensor) -> torch.Tensor:
        """Score all pairs of (N, C, h, w) maps with the stored statistics, in blocks: (N, N) float32."""
        size = max(1, _BLOCK_BYTES // (4 * len(maps) * self.places**2))
        with evaluation_mode(self):
            return torch.cat([self(part, maps) for part in maps.split(size)])


@LOSS_REGISTRY.register()
class PairwiseMatchingLoss(nn.Module):
    """Binary cross entropy of the matching scores of all pairs of a batch, summed over the pairs of an image.

    The pair of an image with itself counts, as in the authors' program. Each rank compares its own images.

    Args:
        scale: weight in the total loss. Default 1.
    """

    loss_name = "loss_matching"

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "PairwiseMatchingLoss":
        """Build the loss from ``MODEL.LOSSES.MATCHING``."""
        return cls(scale=cfg.MODEL.LOSSES.MATCHING.SCALE)

    @force_fp32
    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of ``outputs["matching_scores"]`` (B, B) and ``targets`` (B,): scalar float32.

        Raises:
            ConfigError: if the head computes no scores.
        """
        scores = outputs.get("matching_scores")
        if scores is None:
            raise ConfigError(
                "PairwiseMatchingLoss requires a head that matches feature maps.\n"
                "  fix: set MODEL.HEADS.NAME to QAConvHead"
            )
        same = (targets[:, None] == targets).to(scores.dtype)
        return self.scale * F.binary_cross_entropy_with_logits(scores, same, reduction="none").sum(1).mean()
