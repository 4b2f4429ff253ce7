"""Clustering of features: sparse k-reciprocal Jaccard distances, DBSCAN, and agreement with known identities.

DBSCAN uses only the distances up to eps. They are computed in blocks of images and stored as a sparse matrix, so that
memory grows with the number of close pairs, not with the square of the number of images.
"""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.evaluation.hierarchical import LARGEST_BELOW_ONE, check_hdbscan, hdbscan, numbered_by_first
from fastamp.evaluation.metrics import check_finite_features
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.evaluation.rerank import ReRanking, add_overlaps, reciprocal_weights
from fastamp.layers.distance import pairwise_distance
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, DataError, check_choice
from fastamp.utils.missing import is_missing
from fastamp.utils.progress import track

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

logger = logging.getLogger(__name__)

METHODS = ("dbscan", "hdbscan")
OUTLIER = -1
"""Label of images that are in no cluster."""
# A cluster with these parts of all images and of the median size probably contains several identities.
_DOMINANT_FRACTION, _DOMINANT_RATIO = 0.2, 5
_TRIED_EPS, _TRIED_K1 = (0.2, 0.3, 0.4, 0.5, 0.6), (30, 20, 10, 6, 4)
# More rows per block do not make it faster.
_MAX_BLOCK_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Settings of the clustering of features by k-reciprocal Jaccard distances and DBSCAN or HDBSCAN.

    Attributes:
        eps: largest Jaccard distance of neighbors, inclusive, in 0..1 without both; not used by HDBSCAN. Default: 0.6.
        min_samples: number of neighbors of a core image, itself included; for HDBSCAN see ``hdbscan``. Default: 4.
        k1: number of nearest neighbors for the reciprocity test, the image itself included. Default: 30.
        k2: number of nearest neighbors, the image itself included, whose weights are averaged; 1 disables averaging.
            Default: 6.
        method: ``"dbscan"`` (default), or ``"hdbscan"``, which needs no ``eps`` but scikit-learn.

    Raises:
        ConfigError: if a value is out of range, or scikit-learn is needed and not installed.
    """

    eps: float = 0.6
    min_samples: int = 4
    k1: int = 30
    k2: int = 6
    method: str = "dbscan"

    def __post_init__(self) -> None:
        check_choice("clustering method", self.method, METHODS)
        if self.method == "hdbscan":
            check_hdbscan()
        if not 0 < self.eps < 1 or min(self.min_samples, self.k1, self.k2) < 1:
            raise ConfigError(
                "eps must be above 0 and below 1, the largest Jaccard distance, and min_samples, k1 and k2 at least 1; "
                f"got eps {self.eps}, min_samples {self.min_samples}, k1 {self.k1} and k2 {self.k2}.\n"
                "  fix: choose values such as 0.6, 4, 30 and 6"
            )

    def __str__(self) -> str:
        if self.method == "hdbscan":
            return f"HDBSCAN, min_samples {self.min_samples}, k1 {self.k1}, k2 {self.k2}"
        return f"DBSCAN, eps {self.eps:g}, min_samples {self.min_samples}, k1 {self.k1}, k2 {self.k2}"


def cluster_features(features: torch.Tensor, options: Clustering, *, memory_budget_mb: float = 256) -> np.ndarray:
    """Cluster features by their k-reciprocal Jaccard distances; see ``jaccard_distances``, ``dbscan``, ``hdbscan``."""
    method, eps = (hdbscan, LARGEST_BELOW_ONE) if options.method == "hdbscan" else (dbscan, options.eps)
    distances = jaccard_distances(features, replace(options, eps=eps), memory_budget_mb=memory_budget_mb)
    return method(distances, min_samples=options.min_samples)


@torch.no_grad()
def jaccard_distances(features: torch.Tensor, options: Clustering, *, memory_budget_mb: float = 256) -> "csr_matrix":
    """Compute the k-reciprocal Jaccard distances up to ``options.eps`` of all pairs of images.

    The features are L2-normalized first. With fewer images than ``options.k1``, k1 is the number of images. A
    collective operation: in a distributed run, each rank computes a part of the rows, and all ranks return all rows.

    Args:
        features: (N, D) float, the same on all ranks.
        options: settings of the clustering.
        memory_budget_mb: memory for a block of distances in MiB. Default: 256.

    Returns:
        (N, N) sparse float32, symmetric, with the zeros of the diagonal and of duplicates as explicit entries. Pairs
        without an entry have a distance above eps.

    Raises:
        DataError: if there are no features, or a feature is not finite.

    Source: Zhong et al. 2017, arXiv:1701.08398, eq. 5 to 10, in the form of ``ReRanking(variant="fastreid")``.
    """
    if features.dim() != 2 or len(features) == 0:
        raise DataError(
            f"expected features of shape (N, D) with N at least 1, got {tuple(features.shape)}.\n"
            "  fix: extract the features of at least one image"
        )
    check_finite_features("clustered", features, torch.float32)
    k1 = min(options.k1, len(features))
    if k1 < options.k1:
        logger.warning(
            "k1 is %d instead of %d: there are only %d images.\n  fix: set a smaller k1, or use more images",
            *(k1, options.k1, len(features)),
        )
    features = centered_unit_features(features)
    reranking = ReRanking(k1=k1, k2=options.k2, variant="fastreid")
    k = max(k1, options.k2)
    neighbors = nearest_neighbors(features, features, k, memory_budget_mb=memory_budget_mb, farthest=False)
    weights = reciprocal_weights(features, neighbors.indices, neighbors.farthest, reranking)
    del features, neighbors
    return distances_of_weights(weights, options.eps, memory_budget_mb=memory_budget_mb)


def centered_unit_features(features: torch.Tensor) -> torch.Tensor:
    """Copy (N, D) features as float32, L2-normalized, minus their mean.

    Subtracting the mean keeps the distances, and makes rounding errors relative to the spread instead of the offset.
    """
    features = F.normalize(features.detach().float(), dim=1)
    features -= features.mean(0)
    return features


def distances_of_weights(weights: "csr_matrix", eps: float, *, memory_budget_mb: float = 256) -> "csr_matrix":
    """Compute the Jaccard distances up to ``eps`` from the weights of ``reciprocal_weights``; a collective operation.

    Args:
        weights: (N, N) sparse, weights of each image's k-reciprocal neighbors; rows sum to 1.
        eps: largest distance, inclusive, above 0 and below 1.
        memory_budget_mb: memory for a block of distances in MiB. Default: 256.

    Returns:
        (N, N) sparse float32, see ``jaccard_distances``.
    """
    from scipy.sparse import csr_matrix

    count = weights.shape[0]
    weights.sort_indices()  # both directions of a pair are summed in the same order
    columns, transposed = weights.tocsc(), weights.T.tocsr()
    size = max(1, min(_MAX_BLOCK_ROWS, int(memory_budget_mb * 2**20 / (4 * count))))
    start, stop = comm.shard_range(count, size)
    buffer = torch.zeros(min(size, max(stop - start, 1)), count)
    parts = [(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32))]
    for first in track(range(start, stop, size), -(-(stop - start) // size), "Jaccard distances"):
        last = min(first + size, stop)
        add_overlaps(weights[first:last], columns, buffer[: last - first])
        # The pairs with common neighbors, which are few. Only their entries of the buffer are read, and set to 0 again.
        pairs = weights[first:last] @ transposed
        pairs.sort_indices()
        rows = np.repeat(np.arange(last - first), np.diff(pairs.indptr))
        places = torch.from_numpy(rows * count + pairs.indices)
        shared = buffer.view(-1)[places]
        buffer.view(-1)[places] = 0
        distances = (1 - shared / (2 - shared)).clamp_min_(0).numpy()
        near = distances <= eps
        counts = np.bincount(rows[near], minlength=last - first)
        parts.append((counts, pairs.indices[near].astype(np.int32), distances[near]))
    counts, indices, values = (
        comm.gather_rows(torch.from_numpy(np.concatenate(column))).numpy() for column in zip(*parts, strict=True)
    )
    return csr_matrix((values, indices, np.concatenate(([0], np.cumsum(counts)))), shape=(count, count))


def dbscan(distances: "csr_matrix", *, min_samples: int = 4) -> np.ndarray:
    """Cluster images with DBSCAN (Ester et al. 1996), with the labels of scikit-learn's ``DBSCAN``.

    Images with at least ``min_samples`` neighbors are core images. Core images that are neighbors are in the same
    cluster. Other images with a core neighbor are in its cluster; with several, in the one with the smallest number.

    Args:
        distances: (N, N) sparse, symmetric, with an entry for each pair of neighbors and for the diagonal; the values
            are not used.
        min_samples: number of neighbors of a core image, itself included. Default: 4.

    Returns:
        (N,) int64, clusters numbered by their first core image; ``OUTLIER`` for images without a core neighbor.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    count, degrees = distances.shape[0], np.diff(distances.indptr)
    is_core = degrees >= min_samples
    # Only the entries whose column is a core image; all other entries connect nothing.
    kept = is_core[distances.indices]
    rows = np.repeat(np.arange(count, dtype=distances.indices.dtype), degrees)[kept]
    columns = distances.indices[kept]
    between = is_core[rows]
    graph = csr_matrix(
        (np.ones(between.sum(), dtype=np.int8), (rows[between], columns[between])), shape=distances.shape
    )
    numbers = numbered_by_first(np.where(is_core, connected_components(graph, directed=False)[1], OUTLIER))
    labels = np.full(count, count, dtype=np.int64)
    np.minimum.at(labels, rows, numbers[columns])
    labels[labels == count] = OUTLIER
    return labels


@dataclass(frozen=True)
class ClusterQuality:
    """Sizes of clusters, and their agreement with known identities.

    Attributes:
        clusters: number of clusters.
        outliers: number of images in no cluster.
        images: number of images.
        purity: fraction of the clustered images that have the most frequent identity of their cluster; None without
            identities or clusters.
        nmi: normalized mutual information of clusters and identities of the clustered images, in 0..1, divided by the
            mean of the two entropies; None without identities or clusters.
        split: number of identities in more than one cluster; None without identities.
        merged: number of clusters with more than one identity; None without identities.
    """

    clusters: int
    outliers: int
    images: int
    purity: float | None = None
    nmi: float | None = None
    split: int | None = None
    merged: int | None = None

    def __str__(self) -> str:
        text = f"{self.clusters} clusters, {self.outliers} of {self.images} images are outliers"
        if self.purity is not None and self.nmi is not None:
            text += f", purity {self.purity:.3f}, NMI {self.nmi:.3f}, {self.split} identities split, "
            text += f"{self.merged} clusters with several identities"
        return text


def cluster_quality(labels: np.ndarray, identities: np.ndarray | None = None) -> ClusterQuality:
    """Compute the sizes of clusters and, for known identities, their purity and NMI.

    Args:
        labels: (N,) int64, clusters 0, 1, ...; ``OUTLIER`` for images in no cluster.
        identities: (N,) integers or text, identities, -1 or "" where unknown; None (default) if all are. Outliers are
            excluded.
    """
    is_known = labels != OUTLIER
    sizes = len(np.unique(labels[is_known])), int((~is_known).sum()), len(labels)
    if identities is not None:
        is_known &= ~is_missing(identities)
    if identities is None or not is_known.any():
        return ClusterQuality(*sizes)
    clustered, names = labels[is_known], np.unique(identities[is_known], return_inverse=True)[1]
    pairs, counts = np.unique(np.stack((clustered, names)), axis=1, return_counts=True)
    # The pairs are sorted by cluster.
    _, starts, identities_of = np.unique(pairs[0], return_index=True, return_counts=True)
    total = sum(_entropy(np.unique(labels, return_counts=True)[1]) for labels in (clustered, names))
    # The mutual information is the sum of both entropies minus the joint entropy.
    nmi = 2 * (total - _entropy(counts)) / total if total > 0 else 1.0
    return ClusterQuality(
        *sizes,
        purity=float(np.maximum.reduceat(counts, starts).sum() / len(clustered)),
        nmi=float(min(max(nmi, 0.0), 1.0)),
        split=int((np.bincount(pairs[1]) > 1).sum()),
        merged=int((identities_of > 1).sum()),
    )


def describe_few_clusters(quality: ClusterQuality, options: Clustering, *, eps: str, min_samples: str) -> str:
    """Describe what was found and what to change if there are fewer than two clusters; "" otherwise.

    Args:
        quality: sizes of the clusters.
        options: settings of the clustering.
        eps, min_samples: names of the two settings, as the user sets them.
    """
    if quality.clusters > 1:
        return ""
    images, used, by_density = quality.images, f"{min_samples} {options.min_samples}", options.method == "hdbscan"
    if not by_density:
        used = f"{eps} {options.eps:g}, {used}"
    if quality.clusters:
        found = f"only one cluster found: it has {images - quality.outliers} of {images} images"
        cause = "the features of different identities are too similar, e.g. those of an untrained model"
        change = f"reduce {min_samples if by_density else eps}"
    else:
        found = f"no cluster found: all {images} images are outliers"
        cause = "the features of an identity are not similar enough, or each identity has too few images"
        change = f"reduce {min_samples}" if by_density else f"increase {eps}, reduce {min_samples}"
    return f"{found} ({used}).\n  cause: {cause}\n  fix:   {change}, or use a model that was trained on similar data"


def dominant_cluster(labels: np.ndarray) -> tuple[int, int] | None:
    """Find a cluster that probably merges identities: a fifth of all images, and five times the median size.

    Args:
        labels: (N,) int64, see ``cluster_quality``.

    Returns:
        The cluster and its number of images; None if there is no such cluster.
    """
    names, sizes = np.unique(labels[labels != OUTLIER], return_counts=True)
    if len(names) < 2 or sizes.max() < max(_DOMINANT_FRACTION * len(labels), _DOMINANT_RATIO * np.median(sizes)):
        return None
    return int(names[sizes.argmax()]), int(sizes.max())


def separation(features: torch.Tensor, labels: np.ndarray) -> float:
    """Compute the simplified silhouette of clusters (Vendramin et al. 2010), in -1..1, from cosine distances.

    It is the mean over all images of (b - a) / max(a, b), with the distances a to the mean of the own cluster and b to
    the nearest mean of another one; 0 for outliers. Merged identities increase a, and split ones decrease b.

    Args:
        features: (N, D) float.
        labels: (N,) int64 with at least two clusters.
    """
    rows = np.flatnonzero(labels != OUTLIER)
    cluster_of = torch.from_numpy(labels[rows]).to(features.device).unique(return_inverse=True)[1]
    unit = F.normalize(features[rows].float(), dim=1)
    means = torch.zeros(int(cluster_of.max()) + 1, unit.shape[1], device=unit.device).index_add_(0, cluster_of, unit)
    distances = pairwise_distance(unit, means, "cosine")
    inner = distances.gather(1, cluster_of[:, None])[:, 0].clamp_min(0)
    outer = distances.scatter(1, cluster_of[:, None], torch.inf).amin(1).clamp_min(0)
    values = (outer - inner) / torch.maximum(inner, outer).clamp_min(1e-12)
    return float(values.sum() / len(labels))


def better_settings(features: torch.Tensor, options: Clustering) -> tuple[Clustering, np.ndarray] | None:
    """Search for settings of DBSCAN with the largest ``separation``, and no dominant cluster.

    All combinations of eps 0.2, 0.3, ..., 0.6 and k1 of 30, 20, 10, 6 and 4 are tried.

    Args:
        features: (N, D) float.
        options: settings, whose ``min_samples`` and ``k2`` are kept.

    Returns:
        The settings and their labels; None if all have a dominant cluster or fewer than two clusters.
    """
    best = None
    for k1 in _TRIED_K1:
        tried = replace(options, k1=k1, k2=min(options.k2, k1), eps=max(_TRIED_EPS), method="dbscan")
        distances = jaccard_distances(features, tried)
        for eps in _TRIED_EPS:
            near = distances.copy()
            near.data = np.where(near.data <= eps, near.data + 1, 0)  # entries of 0 are removed
            near.eliminate_zeros()
            labels = dbscan(near, min_samples=options.min_samples)
            if len(np.unique(labels[labels != OUTLIER])) < 2 or dominant_cluster(labels) is not None:
                continue
            score = separation(features, labels)
            if best is None or score > best[0]:
                best = score, replace(tried, eps=eps), labels
    return None if best is None else best[1:]


def _entropy(counts: np.ndarray) -> float:
    """Compute the entropy in nats of a distribution given by counts."""
    fractions = counts / counts.sum()
    return float(-(fractions * np.log(fractions)).sum())
