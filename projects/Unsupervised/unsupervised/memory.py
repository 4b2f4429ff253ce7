"""Losses that compare features with a memory: the parts that all methods share."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

KEYS = (
    Key("UNSUPERVISED.TEMPERATURE", 0.05, "Losses with a memory: temperature of the similarities.", above=0),
    Key(
        "UNSUPERVISED.MOMENTUM",
        0.1,
        "Losses with a memory: weight of the old vector in an update of the memory; 1 keeps it.",
        low=0,
        high=1,
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
    """Update the vector of each image of a batch, one image after the other.

    Images of different vectors do not influence each other, so that the n-th images of all vectors are one update.

    Args:
        memory: (M, D) float32, L2-normalized vectors, e.g. centroids.
        features: (B, D) float32, L2-normalized.
        targets: (B,) int64, rows of the memory.
        momentum: weight of the old vector.

    Returns:
        (M, D) float32, the updated copy.
    """
    memory = memory.clone()
    # Position of each image among the images of its vector in the batch.
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


class MemoryLoss(nn.Module):
    """Base class of losses that compare features with a memory of L2-normalized vectors.

    The target of an image is its row of the memory. A forward pass in training mode with gradients updates the memory
    afterwards, with the features of all ranks in rank order; the loss and its gradient use the memory before the
    update. A skipped step restores the memory. The memory is not part of the model's weights: the trainer starts it in
    each epoch, and saves it.

    The loss is the sum of the mean losses of all groups of images, see ``groups``; over the ranks, the mean of the
    values and gradients is that of the whole batch.

    Args:
        temperature: temperature of the similarities. Default 0.05.
        momentum: weight of the old vector in an update. Default 0.1.

    Attributes:
        memory: (M, D) float32, L2-normalized; empty until ``start_epoch``. The first ``labeled`` rows belong to the
            identities of labeled images, if there are any.
        labeled: () int64, number of rows of labeled images.
        keeps_memory: whether the memory has one vector for each unlabeled image, which is kept when an epoch starts;
            clusters are then those of the memory instead of new features.
    """

    written_in_forward = True
    keeps_memory = False

    memory: torch.Tensor
    labeled: torch.Tensor

    def __init__(self, *, temperature: float = 0.05, momentum: float = 0.1) -> None:
        super().__init__()
        self.temperature, self.momentum = temperature, momentum
        self.register_buffer("memory", torch.empty(0, 0), persistent=False)
        self.register_buffer("labeled", torch.tensor(0), persistent=False)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "MemoryLoss":
        """Build the loss from ``UNSUPERVISED``."""
        keys = cfg.UNSUPERVISED
        return cls(temperature=keys.TEMPERATURE, momentum=keys.MOMENTUM, **cls.further_options(cfg))

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the arguments of a subclass other than those of ``MemoryLoss``. Default: none."""
        return {}

    def start_epoch(
        self, features: torch.Tensor, labels: np.ndarray, *, cameras: np.ndarray, labeled: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Set the memory of an epoch.

        Args:
            features: (N, D) float, features of all training images.
            labels: (N,) int64: identities 0..S-1 of labeled images, clusters S..C-1 of the others, -1 for outliers.
            cameras: (N,) int64, cameras, different in the labeled and the other images.
            labeled: (N,) bool, whether the identity of an image is used.
            epoch: number of the epoch, from 0.

        Returns:
            target of each image, (N,) int64, -1 if the image is not used; and its class, (N,) int64, -1 if the image is
            not used: the sampler draws K images of each class.
        """
        raise NotImplementedError

    def contrast(self, features: torch.Tensor, memory: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each image.

        Args:
            features: (B, D) float32, L2-normalized.
            memory: (M, D) float32.
            targets: (B,) int64, rows of the memory.

        Returns:
            (B,) float32.
        """
        raise NotImplementedError

    def groups(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the group of each image, (B,) int64: all images, or labeled and unlabeled images."""
        return (targets < self.labeled).long()

    def updated(self, memory: torch.Tensor, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a copy of the memory after a batch, see ``update_mean``."""
        return update_mean(memory, features, targets, self.momentum)

    def set_memory(self, memory: torch.Tensor, **tables: Any) -> None:
        """Replace the memory by a copy of ``memory``, (M, D) float32, L2-normalized, and buffers by ``tables``."""
        device = self.memory.device
        self.memory = memory.detach().float().to(device, copy=True)
        for name, values in tables.items():
            setattr(self, name, torch.as_tensor(values).to(device, copy=True))

    def memory_state(self) -> dict[str, torch.Tensor]:
        """Return the memory and its tables, for ``set_memory``."""
        return dict(self.named_buffers())

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: each rank updates them with all features."""
        return tuple(self.memory_state())

    @force_fp32
    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss, and update the memory.

        Args:
            outputs: with ``features`` (B, D) float.
            targets: (B,) int64, rows of the memory.

        Returns:
            Scalar float32.

        Raises:
            ConfigError: if the memory is empty.
        """
        if not len(self.memory):
            raise ConfigError(
                f"{type(self).__name__} has no memory: only ClusterTrainer sets it, before each epoch.\n"
                "  fix: set SOLVER.TRAINER to ClusterTrainer"
            )
        features = F.normalize(outputs["features"], dim=1)
        memory = self.memory.clone()  # the backward pass needs the values before the update
        losses = self.contrast(features, memory, targets)
        all_targets = comm.all_gather(targets) if self.training else targets
        counts = torch.bincount(self.groups(all_targets))
        # The mean over the ranks divides by their number.
        loss = (losses / counts[self.groups(targets)]).sum() * (len(all_targets) / len(targets))
        if self.training and torch.is_grad_enabled():
            self.memory.copy_(self.updated(memory, comm.all_gather(features.detach()), all_targets))
        return loss
