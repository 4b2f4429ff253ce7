"""HDBSCAN (Campello et al. 2013) by scikit-learn, on the k-reciprocal Jaccard distances below 1.

The Jaccard distance of images without common neighbors is exactly 1. HDBSCAN needs a connected graph: the components
of the sparse graph are connected by edges of this distance, which changes no distance.
"""

from typing import TYPE_CHECKING

import numpy as np

from fastamp.utils.errors import optional_package

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

LARGEST_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
"""Largest distance below 1 in float32: the ``eps`` for which ``jaccard_distances`` returns all of them."""


def check_hdbscan() -> None:
    """Check that scikit-learn is installed.

    Raises:
        ConfigError: if scikit-learn 1.3 or later is not installed.
    """
    with optional_package("HDBSCAN requires scikit-learn 1.3 or later", "cluster", ", or choose the method dbscan"):
        from sklearn.cluster import HDBSCAN  # noqa: F401


def hdbscan(distances: "csr_matrix", *, min_samples: int = 4) -> np.ndarray:
    """Cluster images with scikit-learn's ``HDBSCAN``.

    Args:
        distances: (N, N) sparse, symmetric, all Jaccard distances below 1; see ``jaccard_distances`` with ``eps`` of
            ``LARGEST_BELOW_ONE``.
        min_samples: smallest number of images of a cluster, and number of neighbors for the density, itself included.
            Default: 4.

    Returns:
        (N,) int64, clusters numbered by their first image; -1 for images in no cluster. The labels are those of the
        dense matrix, in which the other distances are 1, except that equal distances may be merged in another order.

    Raises:
        ConfigError: if scikit-learn is not installed.
    """
    check_hdbscan()
    from sklearn.cluster import HDBSCAN

    count, size = distances.shape[0], max(2, min_samples)
    if count < size:
        return np.full(count, -1, dtype=np.int64)
    model = HDBSCAN(
        min_cluster_size=size,
        min_samples=min_samples,
        metric="precomputed",
        metric_params={"max_distance": 1.0},
        copy=True,
    )
    return numbered_by_first(model.fit_predict(_connected(distances).astype(np.float64)))


def numbered_by_first(labels: np.ndarray) -> np.ndarray:
    """Number clusters by their first image: (N,) int64, given (N,) int; negative labels become -1."""
    names, first, inverse = np.unique(labels.clip(-1), return_index=True, return_inverse=True)
    numbers = np.where(names < 0, len(labels), first).argsort().argsort()  # outliers last
    numbers[names < 0] = -1
    return np.asarray(numbers[inverse])


def _connected(distances: "csr_matrix") -> "csr_matrix":
    """Connect the components of a graph by edges with the distance 1 between their first images.

    Explicit zeros become the smallest positive number: sparse graph algorithms regard a zero as no edge.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    first = np.unique(connected_components(distances, directed=False)[1], return_index=True)[1]
    rows, ones = np.full(len(first) - 1, first[0]), np.ones(len(first) - 1, dtype=distances.dtype)
    edges = csr_matrix((ones, (rows, first[1:])), shape=distances.shape)
    graph = distances.copy()
    graph.data = np.maximum(graph.data, np.finfo(np.float32).tiny)
    return graph + edges + edges.T
