"""Cluster features and update memories in two processes: cluster_ranks.py FOLDER. Saves FOLDER/RANK.pth."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import run_forked

from fastamp.config.projects import import_project
from fastamp.evaluation.clustering import Clustering, dbscan, jaccard_distances
from fastamp.utils import comm


def labels_and_memories() -> dict[str, Any]:
    """Return labels, distances, and the losses, gradients and memory of three passes over this rank's images.

    The first 18 of 72 images are labeled; each batch alternates between labeled and unlabeled images.
    """
    import_project("Unsupervised")
    from unsupervised.camera_proxies import CameraProxyLoss
    from unsupervised.cluster_contrast import ClusterContrastLoss
    from unsupervised.hybrid_memory import HybridMemoryLoss

    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(8, 16, generator=generator).repeat_interleave(9, dim=0)
    features = centers + 0.7 * torch.randn(72, 16, generator=generator)
    distances = jaccard_distances(features, Clustering(k1=9, k2=3), memory_budget_mb=0.001)
    clusters = dbscan(distances)
    found: dict[str, Any] = {"labels": clusters, "columns": distances.indices, "distances": distances.data}
    labeled = np.arange(72) < 18
    others = np.unique(clusters[18:], return_inverse=True)[1] - int((clusters[18:] < 0).any())
    labels = np.concatenate((np.arange(18) // 9, np.where(others < 0, -1, others + 2)))
    cameras = np.where(labeled, 0, 3) + np.arange(72) % 3
    part = slice(*comm.shard_range(16))
    for loss in (ClusterContrastLoss(), HybridMemoryLoss(), CameraProxyLoss(start_epoch=0, negatives=5)):
        targets, _ = loss.start_epoch(features, labels, cameras=cameras, labeled=labeled, epoch=0)
        used = np.flatnonzero(targets[18:] >= 0) + 18
        result: dict[str, Any] = {"losses": [], "gradients": []}
        for number in range(3):
            rows = np.random.default_rng(number).permutation(used)[:16]
            rows[::2] = np.random.default_rng(number).permutation(18)[:8]
            batch = torch.randn(16, 16, generator=generator)[part].requires_grad_()
            value = loss({"features": batch}, torch.from_numpy(targets[rows])[part])
            value.backward()
            result["losses"].append(value.item())
            result["gradients"].append(batch.grad)
        found[loss.loss_name] = result | {"memory": loss.memory}
    return found


def main(folder: Path) -> None:
    torch.save(labels_and_memories(), folder / f"{comm.get_rank()}.pth")


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), Path(sys.argv[1]))
