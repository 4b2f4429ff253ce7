"""Camera-aware proxies (CAP, Wang et al. 2021, arXiv:2012.10674): losses over the images of a cluster by camera."""

from typing import Any

import numpy as np
import torch

from fastamp.config import CfgNode, Key
from fastamp.modeling.losses import LOSS_REGISTRY
from unsupervised.memory import MemoryLoss, compute_centroids

KEYS = (
    Key(
        "UNSUPERVISED.INTER_CAMERA.WEIGHT",
        0.5,
        "CameraProxyLoss: weight of the loss over the proxies of all cameras.",
        low=0,
    ),
    Key(
        "UNSUPERVISED.INTER_CAMERA.START_EPOCH",
        5,
        "CameraProxyLoss: number of first epochs that use only the loss over the proxies of each camera.",
        low=0,
    ),
    Key(
        "UNSUPERVISED.INTER_CAMERA.NEGATIVES",
        50,
        "CameraProxyLoss: most similar proxies of other clusters that are negatives.",
        low=1,
    ),
)


@LOSS_REGISTRY.register()
class CameraProxyLoss(MemoryLoss):
    """Contrastive losses over camera-aware proxies: the images of a cluster by one camera (Wang et al. 2021).

    The memory has the centroid of each proxy. The intra-camera loss (eq. 3) is the cross entropy over the proxies of
    the camera of the image. The inter-camera loss (eq. 5) is the mean of -log p over the proxies of its cluster, where
    p is the softmax over them and the most similar proxies of other clusters. Both are averaged over the images of each
    camera in the batch, and summed over the cameras. Differs from the authors' program: if there are fewer negatives
    than ``negatives``, the proxies of the cluster are not counted again as negatives.

    Args:
        weight: weight of the inter-camera loss. Default 0.5.
        start_epoch: first epoch with the inter-camera loss. Default 5.
        negatives: number of negatives. Default 50.
        options: arguments of ``MemoryLoss``.

    Attributes:
        clusters, cameras: (M,) int64, cluster and camera of each proxy.
        inter_weight: () float32, weight of the inter-camera loss in this epoch.
    """

    loss_name = "loss_proxy"
    start_epoch_key = "UNSUPERVISED.INTER_CAMERA.START_EPOCH"

    clusters: torch.Tensor
    cameras: torch.Tensor
    inter_weight: torch.Tensor

    def __init__(self, *, weight: float = 0.5, start_epoch: int = 5, negatives: int = 50, **options: Any) -> None:
        super().__init__(**options)
        self.weight, self.first_epoch, self.negatives = weight, start_epoch, negatives
        self.register_buffer("clusters", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("cameras", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("inter_weight", torch.tensor(float(weight)), persistent=False)

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the arguments of the inter-camera loss."""
        inter = cfg.UNSUPERVISED.INTER_CAMERA
        return {"weight": inter.WEIGHT, "start_epoch": inter.START_EPOCH, "negatives": inter.NEGATIVES}

    def start_epoch(
        self, features: torch.Tensor, labels: np.ndarray, *, cameras: np.ndarray, labeled: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Set the memory to the centroids of the proxies; targets and classes are the proxies."""
        used = labels >= 0
        # Labels of labeled images are the smallest, so that their proxies are the first rows.
        pairs, numbers = np.unique(np.stack((labels[used], cameras[used])), axis=1, return_inverse=True)
        proxies = np.full(len(labels), -1, dtype=np.int64)
        proxies[used] = numbers.reshape(-1)
        self.set_memory(
            compute_centroids(features, proxies),
            labeled=proxies[labeled].max(initial=-1) + 1,
            clusters=pairs[0],
            cameras=np.unique(pairs[1], return_inverse=True)[1],
            inter_weight=torch.tensor(self.weight if epoch >= self.first_epoch else 0.0),
        )
        return proxies, proxies

    def groups(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the camera of each image, (B,) int64."""
        return self.cameras[targets]

    def contrast(self, features: torch.Tensor, memory: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each image; see ``MemoryLoss.contrast``."""
        excluded = -torch.inf
        similarity = features @ memory.t() / self.temperature
        target_similarity = similarity.gather(1, targets[:, None])[:, 0]
        same_camera = self.cameras[targets][:, None] == self.cameras
        intra = similarity.masked_fill(~same_camera, excluded).logsumexp(1) - target_similarity
        same_cluster = self.clusters[targets][:, None] == self.clusters
        negatives = similarity.masked_fill(same_cluster, excluded)
        hardest = negatives.topk(min(self.negatives, len(memory)), dim=1).values
        positives = similarity.masked_fill(~same_cluster, excluded)
        total = torch.cat((positives, hardest), dim=1).logsumexp(1)
        inter = total - (similarity * same_cluster).sum(1) / same_cluster.sum(1)
        return intra + self.inter_weight * inter
