"""Cluster contrast (Dai et al. 2022, arXiv:2103.11568): contrastive loss over a memory of cluster centroids."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import Key
from fastamp.modeling.losses import LOSS_REGISTRY
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("UNSUPERVISED.TEMPERATURE", 0.05, "ClusterContrastLoss: temperature of the similarities.", above=0),
    Key(
        "UNSUPERVISED.MOMENTUM",
        0.1,
        "ClusterContrastLoss: weight of the old centroid in an update of the memory; 1 keeps it.",
        low=0,
        high=1,
    ),
    Key(
        "UNSUPERVISED.UPDATE",
        "mean",
        "ClusterContrastLoss: images that update their centroid: each image of the batch in turn (mean), or only the "
        "one of each cluster that is least similar to the centroid (hard).",
        choices=("mean", "hard"),
    ),
)


def compute_centroids(features: torch.Tensor, labels: np.ndarray) -> torch.Tensor:
    """Compute the L2-normalized mean of the L2-normalized features of each cluster.

    Args:
        features: (N, D) float.
        labels: (N,) int64, clusters 0..C-1; images with a negative label are excluded.

    Returns:
        (C, D) float32, on the CPU: the order of the sums does not depend on the device.
    """
    rows = torch.from_numpy(np.flatnonzero(labels >= 0))
    unit = F.normalize(features.detach().float().cpu()[rows], dim=1)
    clusters = torch.from_numpy(labels)[rows]
    sums = torch.zeros(int(labels.max(initial=-1)) + 1, features.shape[1]).index_add_(0, clusters, unit)
    return F.normalize(sums / torch.bincount(clusters)[:, None], dim=1)


@torch.no_grad()
def update_mean(memory: torch.Tensor, features: torch.Tensor, targets: torch.Tensor, momentum: float) -> torch.Tensor:
    """Update the centroid of each image of a batch, one image after the other.

    Images of different clusters do not influence each other, so that the n-th images of all clusters are one update.

    Args:
        memory: (C, D) float32, L2-normalized centroids.
        features: (B, D) float32, L2-normalized.
        targets: (B,) int64, clusters.
        momentum: weight of the old centroid.

    Returns:
        (C, D) float32, the updated copy.
    """
    memory = memory.clone()
    # Position of each image among the images of its cluster in the batch.
    order = torch.argsort(targets, stable=True)
    counts = torch.bincount(targets, minlength=len(memory))
    starts = counts.cumsum(0) - counts
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device) - starts[targets[order]]
    for turn in range(int(positions.max()) + 1):
        rows = (positions == turn).nonzero().flatten()
        mixed = momentum * memory[targets[rows]] + (1 - momentum) * features[rows]
        memory[targets[rows]] = F.normalize(mixed, dim=1)
    return memory


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
class ClusterContrastLoss(nn.Module):
    """Cross entropy of the similarities of a feature to the centroids of all clusters (Dai et al. 2022, eq. 2).

    A forward pass in training mode with gradients updates the memory afterwards (eq. 4 and 5), with the features of all
    ranks in rank order; the loss and its gradient use the memory before the update. A skipped step restores the memory.
    The memory is not part of the model's weights: the trainer sets it in each epoch, and saves it.

    Args:
        temperature (float): temperature of the similarities. Default 0.05.
        momentum (float): weight of the old centroid. Default 0.1.
        update (str): ``"mean"`` (default) or ``"hard"``, see ``UNSUPERVISED.UPDATE``.

    Attributes:
        memory (torch.Tensor): (C, D) float32, L2-normalized centroids; empty until ``set_memory``.
    """

    loss_name = "loss_cluster"
    written_in_forward = True

    def __init__(self, *, temperature: float = 0.05, momentum: float = 0.1, update: str = "mean") -> None:
        super().__init__()
        self.temperature, self.momentum, self.update = temperature, momentum, update
        self.register_buffer("memory", torch.empty(0, 0), persistent=False)

    @classmethod
    def from_config(cls, cfg: Any) -> "ClusterContrastLoss":
        """Build the loss from ``UNSUPERVISED``."""
        keys = cfg.UNSUPERVISED
        return cls(temperature=keys.TEMPERATURE, momentum=keys.MOMENTUM, update=keys.UPDATE)

    def set_memory(self, memory: torch.Tensor) -> None:
        """Replace the memory by a copy of ``memory``, (C, D) float32, L2-normalized."""
        self.memory = memory.detach().float().to(self.memory.device, copy=True)

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: each rank updates them with all features."""
        return ("memory",)

    @force_fp32
    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss, and update the memory.

        Args:
            outputs (dict[str, torch.Tensor]): with ``features`` (B, D) float.
            targets (torch.Tensor): (B,) int64, clusters in 0..C-1.

        Returns:
            torch.Tensor: scalar float32, the mean over the batch.

        Raises:
            ConfigError: if the memory is empty.
        """
        if not len(self.memory):
            raise ConfigError(
                "ClusterContrastLoss has no clusters: only ClusterTrainer forms them, before each epoch.\n"
                "  fix: set SOLVER.TRAINER to ClusterTrainer"
            )
        features = F.normalize(outputs["features"], dim=1)
        memory = self.memory.clone()  # the backward pass needs the values before the update
        loss = F.cross_entropy(features @ memory.t() / self.temperature, targets)
        if self.training and torch.is_grad_enabled():
            gathered = comm.all_gather(features.detach()), comm.all_gather(targets)
            self.memory.copy_(UPDATES[self.update](memory, *gathered, self.momentum))
        return loss
