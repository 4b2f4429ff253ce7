"""Cluster contrast (Dai et al. 2022, arXiv:2103.11568): contrastive loss over a memory of cluster centroids."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.config import CfgNode, Key
from fastamp.modeling.losses import LOSS_REGISTRY
from unsupervised.memory import MemoryLoss, compute_centroids, update_mean

KEYS = (
    Key(
        "UNSUPERVISED.UPDATE",
        "mean",
        "ClusterContrastLoss: images that update their centroid: each image of the batch in turn (mean), or only the "
        "one of each cluster that is least similar to the centroid (hard).",
        choices=("mean", "hard"),
    ),
)


@torch.no_grad()
def update_hard(memory: torch.Tensor, features: torch.Tensor, targets: torch.Tensor, momentum: float) -> torch.Tensor:
    """Update the centroid of each cluster of a batch with its least similar image; see ``update_mean``."""
    similarity = (features * memory[targets]).sum(1)
    rows = []
    for cluster in targets.unique().tolist():
        of_cluster = (targets == cluster).nonzero().flatten()
        rows.append(of_cluster[similarity[of_cluster].argmin()])
    chosen = torch.stack(rows)
    return update_mean(memory, features[chosen], targets[chosen], momentum)


UPDATES = {"mean": update_mean, "hard": update_hard}


@LOSS_REGISTRY.register()
class ClusterContrastLoss(MemoryLoss):
    """Cross entropy of the similarities of a feature to the centroids of all clusters (Dai et al. 2022, eq. 2 to 5).

    Args:
        update: ``"mean"`` (default) or ``"hard"``, see ``UNSUPERVISED.UPDATE``.
        options: arguments of ``MemoryLoss``.
    """

    loss_name = "loss_cluster"

    def __init__(self, *, update: str = "mean", **options: Any) -> None:
        super().__init__(**options)
        self.update = update

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the argument ``update``."""
        return {"update": cfg.UNSUPERVISED.UPDATE}

    def start_epoch(
        self, features: torch.Tensor, labels: np.ndarray, *, cameras: np.ndarray, labeled: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Set the memory to the centroids of the clusters; targets and classes are the clusters."""
        self.set_memory(compute_centroids(features, labels), labeled=labels[labeled].max(initial=-1) + 1)
        return labels, labels

    def contrast(self, features: torch.Tensor, memory: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each image; see ``MemoryLoss.contrast``."""
        return F.cross_entropy(features @ memory.t() / self.temperature, targets, reduction="none")

    def updated(self, memory: torch.Tensor, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a copy of the memory after a batch."""
        return UPDATES[self.update](memory, features, targets, self.momentum)
