"""HDBSCAN on sparse Jaccard distances against scikit-learn on the dense matrix."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from fastamp.evaluation.clustering import Clustering, cluster_features, cluster_quality, jaccard_distances
from fastamp.evaluation.hierarchical import LARGEST_BELOW_ONE, hdbscan
from fastamp.utils.errors import ConfigError

REFERENCE = Path(__file__).parents[1] / "reference/methods"


def dense_labels(distances, min_samples):
    """Cluster the dense matrix, in which pairs without an entry have the distance 1."""
    from sklearn.cluster import HDBSCAN

    dense, entries = np.ones(distances.shape), distances.tocoo()
    dense[entries.row, entries.col] = entries.data
    size = max(2, min_samples)
    return HDBSCAN(min_cluster_size=size, min_samples=min_samples, metric="precomputed", copy=True).fit_predict(dense)


def distances_of(name):
    data = np.load(REFERENCE / f"unsup_{name}.npz")
    options = Clustering(eps=LARGEST_BELOW_ONE, k1=int(data["k1"]), k2=int(data["k2"]))
    return jaccard_distances(torch.from_numpy(data["features"]), options)


def test_labels_equal_those_of_the_dense_matrix():
    random = np.random.default_rng(0)
    points = np.concatenate([center + 0.02 * random.standard_normal((12, 3)) for center in random.random((9, 3))])
    dense = np.sqrt(np.square(points[:, None] - points).sum(-1))
    dense[dense > 0.3] = 1
    rows, columns = np.nonzero(dense < 1)  # with the zeros of the diagonal
    sparse = csr_matrix((dense[rows, columns], (rows, columns)), shape=dense.shape)
    for min_samples in (1, 3, 5):
        found = hdbscan(sparse, min_samples=min_samples)
        quality = cluster_quality(found, dense_labels(sparse, min_samples))
        assert quality.clusters > 3 and quality.purity == 1 and quality.nmi > 0.9999, min_samples
        first = [np.flatnonzero(found == cluster)[0] for cluster in range(quality.clusters)]
        assert first == sorted(first)


@pytest.mark.parametrize("min_samples", [4, 8])
def test_labels_of_reference_features_agree_with_those_of_the_dense_matrix(min_samples):
    """Many density distances are equal, so that the labels of a few images depend on the order."""
    distances = distances_of("c1")
    found = hdbscan(distances, min_samples=min_samples)
    expected = dense_labels(distances, min_samples)
    assert (found[expected >= 0] >= 0).mean() > 0.9
    quality = cluster_quality(found, expected)
    assert quality.nmi > 0.95 and abs(quality.clusters - len(set(expected) - {-1})) <= 2


def test_identities_are_found_and_degenerate_inputs_are_outliers():
    random = np.random.default_rng(1)
    names = np.repeat(np.arange(7), 9)
    features = random.standard_normal((7, 16))[names] + 0.1 * random.standard_normal((63, 16))
    options = Clustering(k1=9, k2=3, method="hdbscan")
    found = cluster_features(torch.from_numpy(features.astype(np.float32)), options)
    quality = cluster_quality(found, names)
    assert quality.clusters == 7 and quality.purity == 1
    assert hdbscan(csr_matrix((1, 1)), min_samples=4).tolist() == [-1]
    assert "HDBSCAN" in str(options) and "DBSCAN, eps" in str(Clustering())
    with pytest.raises(ConfigError, match="'kmeans'"):
        Clustering(method="kmeans")
