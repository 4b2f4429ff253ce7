"""Clusters of the images of an extraction, as a CSV file and an HTML page."""

from pathlib import Path

import numpy as np
import torch

from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation.clustering import (
    Clustering,
    ClusterQuality,
    better_settings,
    cluster_features,
    cluster_quality,
    dominant_cluster,
)
from fastamp.report.cluster_page import write_cluster_page
from fastamp.retrieval.features import Features
from fastamp.utils import files
from fastamp.utils.missing import is_missing

_MOST_TRIED = 20_000


def cluster(
    extraction: Features, options: Clustering, *, device: torch.device
) -> tuple[np.ndarray, ClusterQuality, np.ndarray]:
    """Cluster the images of an extraction.

    Returns:
        labels (N,) int64; the sizes of the clusters, and their agreement with the known identities; and the known
        identities (N,) str, "" where unknown.
    """
    features = torch.from_numpy(np.array(extraction.matrix)).to(device)
    labels, pids = cluster_features(features, options), extraction.images.pids
    names = np.where(is_missing(pids), "", pids.astype(str)) if pids.dtype.kind in "iu" else pids
    return labels, cluster_quality(labels, names), names


def describe_dominant_cluster(
    extraction: Features, labels: np.ndarray, options: Clustering, *, device: torch.device
) -> str:
    """Describe a cluster that probably merges identities, and settings that do not; "" if there is none.

    Other settings are tried for up to 20,000 images, see ``better_settings``.
    """
    cluster = dominant_cluster(labels)
    if cluster is None:
        return ""
    sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
    text = (
        f"warning: cluster {cluster[0]} has {cluster[1]} of {len(labels)} images, and the median of the {len(sizes)} "
        f"clusters is {np.median(sizes):g}: it probably contains several identities.\n  fix: "
    )
    better = None
    if len(labels) <= _MOST_TRIED:
        better = better_settings(torch.from_numpy(np.array(extraction.matrix)).to(device), options)
    if better is None:
        return f"{text}reduce --eps and --k1, or use a model that was trained on similar data"
    settings, others = better
    sizes = np.unique(others[others >= 0], return_counts=True)[1]
    return (
        f"{text}--eps {settings.eps:g} --k1 {settings.k1} --k2 {settings.k2} gives {len(sizes)} clusters, the largest "
        f"with {sizes.max()} images, and {int((others < 0).sum())} outliers (the largest simplified silhouette of the "
        "settings that were tried)"
    )


def write_csv(path: Path, extraction: Features, labels: np.ndarray) -> None:
    """Write ``path,cluster`` of each image, and its box ``x0,y0,x1,y1`` if the extraction has boxes.

    Raises:
        ConfigError: if the file cannot be written.
    """
    images = extraction.images
    columns = {"path": images.paths, "cluster": labels}
    if images.boxes is not None:
        columns |= dict(zip(("x0", "y0", "x1", "y1"), images.boxes.T, strict=True))
    files.write_csv(path, [[*columns], *zip(*(values.tolist() for values in columns.values()), strict=True)])


def write_page(
    path: Path, extraction: Features, labels: np.ndarray, quality: ClusterQuality, names: np.ndarray
) -> None:
    """Write the HTML page of the clusters; see ``write_cluster_page``."""
    boxes = extraction.images.boxes
    items = [
        ImageItem(file, names[row], 0, box=tuple(boxes[row].tolist()) if boxes is not None else None)
        for row, file in enumerate(extraction.images.paths.tolist())
    ]
    write_cluster_page(path, labels, items, title=extraction.path.name, summary=str(quality), identities=names)
