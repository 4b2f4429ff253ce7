"""Self-paced contrastive learning (SpCL, Ge et al. 2020, arXiv:2006.02713): loss over a memory of instances."""

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.modeling.losses import LOSS_REGISTRY
from unsupervised.memory import MemoryLoss, compute_centroids
from unsupervised.reliability import with_own_labels

_EPSILON = 1e-6


@LOSS_REGISTRY.register()
class HybridMemoryLoss(MemoryLoss):
    """Unified contrastive loss of SpCL (eq. 1 and 2, updates eq. 3 and 4).

    The memory has the centroid of each identity of the labeled images, and one vector for each unlabeled image. The
    similarities to the vectors of a cluster are averaged; outliers are classes of their own. With p the softmax over
    all classes, the loss is -log(p + 1e-6), with 1e-6 also added to the denominator of p, as in the authors' program.
    Differs: the largest similarity is subtracted before the exponential, so that small temperatures do not overflow.

    Attributes:
        labels: (M,) int64, class of each row of the memory, 0..L-1.
        counts: (L,) int64, rows of each class.
    """

    loss_name = "loss_hybrid"
    keeps_memory = True

    labels: torch.Tensor
    counts: torch.Tensor

    def __init__(self, *, temperature: float = 0.05, momentum: float = 0.2) -> None:
        super().__init__(temperature=temperature, momentum=momentum)
        self.register_buffer("labels", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("counts", torch.empty(0, dtype=torch.int64), persistent=False)

    def set_labels(self, labels: np.ndarray) -> np.ndarray:
        """Set the class of each row of the memory, (M,) int64, any values; return them as 0..L-1."""
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self.set_memory(self.memory, labels=classes, counts=counts)
        return classes

    def start_epoch(
        self, features: torch.Tensor, labels: np.ndarray, *, cameras: np.ndarray, labeled: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Set the classes of the memory, and in the first epoch the memory; the target of an image is its vector."""
        identities = int(labels[labeled].max(initial=-1)) + 1
        if not len(self.memory):
            centroids = compute_centroids(features, np.where(labeled, labels, -1))
            instances = F.normalize(features.float().cpu()[torch.from_numpy(~labeled)], dim=1)
            self.set_memory(torch.cat((centroids, instances)), labeled=identities)
        targets = labels.copy()
        targets[~labeled] = identities + np.arange((~labeled).sum())
        classes = self.set_labels(with_own_labels(np.concatenate((np.arange(identities), labels[~labeled]))))
        return targets, classes[targets]

    def contrast(self, features: torch.Tensor, memory: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each image; see ``MemoryLoss.contrast``."""
        similarity = features @ memory.t() / self.temperature
        means = similarity.new_zeros(len(features), len(self.counts)).index_add(1, self.labels, similarity)
        means = means / self.counts
        shift = means.detach().amax(1, keepdim=True).clamp_min(0)
        weights = (means - shift).exp()
        total = weights.sum(1) + _EPSILON * (-shift[:, 0]).exp()
        target_weight = weights.gather(1, self.labels[targets][:, None])[:, 0]
        return -(target_weight / total + _EPSILON).log()
