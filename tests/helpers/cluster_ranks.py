"""Cluster features and update a memory in two processes: cluster_ranks.py FOLDER. Saves FOLDER/RANK.pth."""

import sys
from pathlib import Path
from typing import Any

import torch
from forked import run_forked

from fastamp.config.projects import import_project
from fastamp.evaluation.clustering import Clustering, dbscan, jaccard_distances
from fastamp.utils import comm


def labels_and_memory() -> dict[str, Any]:
    """Return labels, distances, and the losses, gradients and memory of three passes over this rank's images."""
    import_project("Unsupervised")
    from unsupervised.cluster_contrast import ClusterContrastLoss, compute_centroids

    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(8, 16, generator=generator).repeat_interleave(9, dim=0)
    features = centers + 0.7 * torch.randn(72, 16, generator=generator)
    distances = jaccard_distances(features, Clustering(k1=9, k2=3), memory_budget_mb=0.001)
    labels = dbscan(distances)
    found = {"labels": labels, "columns": distances.indices, "distances": distances.data, "losses": [], "gradients": []}
    loss = ClusterContrastLoss()
    loss.set_memory(compute_centroids(features, labels))
    share = slice(*comm.shard_range(16))
    for _ in range(3):
        targets = torch.randint(len(loss.memory), (16,), generator=generator)[share]
        batch = torch.randn(16, 16, generator=generator)[share].requires_grad_()
        value = loss({"features": batch}, targets)
        value.backward()
        found["losses"].append(value.item())
        found["gradients"].append(batch.grad)
    return found | {"memory": loss.memory}


def main(folder: Path) -> None:
    torch.save(labels_and_memory(), folder / f"{comm.get_rank()}.pth")


if __name__ == "__main__":
    run_forked(main, 2, Path(sys.argv[1]), Path(sys.argv[1]))
