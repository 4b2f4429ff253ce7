"""Reliability criterion of SpCL (Ge et al. 2020, arXiv:2006.02713, sec. 3.3): keep clusters that are stable in eps."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

# The threshold of independence is that of this fraction of the clusters in the first epoch.
_FRACTION = 0.9


def distances_up_to(distances: "csr_matrix", eps: float) -> "csr_matrix":
    """Exclude the entries of sparse distances that are larger than ``eps``; explicit zeros are kept."""
    from scipy.sparse import csr_matrix

    kept = distances.data <= np.float32(eps)
    ends = np.concatenate(([0], np.cumsum(kept)))[distances.indptr]
    return csr_matrix((distances.data[kept], distances.indices[kept], ends), shape=distances.shape)


def with_own_labels(labels: np.ndarray) -> np.ndarray:
    """Replace the negative label of each outlier by a unique one above those of the clusters; (N,) int64."""
    labels = labels.copy()
    outliers = np.flatnonzero(labels < 0)
    labels[outliers] = labels.max(initial=-1) + 1 + np.arange(len(outliers))
    return labels


def without_own_labels(labels: np.ndarray) -> np.ndarray:
    """Number the clusters 0, 1, ... in the order of their labels; -1 for clusters of one image."""
    _, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    is_cluster = counts > 1
    return np.where(is_cluster, np.cumsum(is_cluster) - 1, -1)[numbers]


def reliable_labels(
    labels: np.ndarray, tight: np.ndarray, loose: np.ndarray, threshold: float | None = None
) -> tuple[np.ndarray, float]:
    """Turn images of unreliable clusters into outliers.

    An image keeps its cluster if the independence of the cluster is at most the threshold, and the compactness of the
    image is that of its cluster. Compactness and independence of a cluster are the smallest of its images, as in the
    authors' program.

    Args:
        labels, tight, loose: (N,) int64, clusters 0, 1, ... at eps, at a smaller and at a larger eps; negative for
            outliers.
        threshold: largest independence of a reliable cluster. Default: the one of nine tenths of the clusters; it is
            kept for the next epochs. There must be a cluster.

    Returns:
        ``(labels, threshold)``: (N,) int64, in which clusters keep their numbers; outliers and images of unreliable
        clusters have labels of their own, with gaps between the numbers. And the largest independence of a reliable
        cluster.
    """
    labels = with_own_labels(labels)
    compactness, independence = (
        _distances_of_clusters(labels, with_own_labels(clustering)) for clustering in (tight, loose)
    )
    counts = np.bincount(labels)
    smallest_compactness, smallest_independence = (np.full(len(counts), np.inf, np.float32) for _ in range(2))
    np.minimum.at(smallest_compactness, labels, compactness)
    np.minimum.at(smallest_independence, labels, independence)
    if threshold is None:
        ordered = np.sort(smallest_independence[counts > 1])
        threshold = float(ordered[min(len(ordered) - 1, round(len(ordered) * _FRACTION))])
    kept = (smallest_independence[labels].astype(np.float64) <= threshold) & (
        compactness <= smallest_compactness[labels]
    )
    result = labels.copy()
    result[~kept] = len(counts) + np.arange((~kept).sum())
    return result, threshold


def _distances_of_clusters(labels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute one minus the intersection over union of the two clusters of each image, (N,) float32; 0 is best."""
    _, pairs, shared = np.unique(np.stack((labels, others)), axis=1, return_inverse=True, return_counts=True)
    both = shared[pairs.reshape(-1)].astype(np.float32)
    either = (np.bincount(labels)[labels] + np.bincount(others)[others]).astype(np.float32) - both
    return 1 - both / either
