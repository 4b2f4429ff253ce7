"""Tests of clustering: equality with the reference program, scikit-learn and naive loops, and degenerate inputs."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_ranking import naive_reciprocal_weights
from scipy.sparse import csr_matrix
from sklearn.cluster import DBSCAN
from sklearn.metrics import normalized_mutual_info_score

from fastamp.evaluation.clustering import (
    OUTLIER,
    Clustering,
    cluster_features,
    cluster_quality,
    dbscan,
    distances_of_weights,
    jaccard_distances,
)
from fastamp.evaluation.rerank import ReRanking, reciprocal_weights
from fastamp.fastreid.utils.compute_dist import compute_jaccard_distance
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = Path(__file__).parents[1] / "reference/methods"
EPS = ("0.40", "0.55", "0.60", "0.70")


def load(name):
    with np.load(REFERENCE / f"unsup_{name}.npz") as file:
        return dict(file)


def test_labels_equal_the_reference_program(subtests):
    for name, eps, budget in itertools.product(["c1", "c2"], EPS, [256, 0.05]):
        with subtests.test(name=name, eps=eps, budget=budget):
            data = load(name)
            features = torch.from_numpy(data["features"])
            options = Clustering(eps=float(eps))
            labels = cluster_features(features, options, memory_budget_mb=budget)
            assert (labels == data[f"labels_eps{eps}"]).all()
            dense = compute_jaccard_distance(features, k1=30, k2=6)
            distances = jaccard_distances(features, options, memory_budget_mb=budget)
            expected = DBSCAN(eps=float(eps), min_samples=4, metric="precomputed").fit_predict(dense.clip(0))
            assert (labels == expected).all()
            assert distances.nnz == (dense <= float(eps)).sum()
            stored = dense[np.repeat(np.arange(len(dense)), np.diff(distances.indptr)), distances.indices]
            np.testing.assert_allclose(distances.data, stored, atol=1e-6)


@pytest.mark.parametrize("name", ["c1", "dup"])
def test_distances_equal_the_reference_program_for_its_neighbors(name):
    """The order of exact duplicates is that of the search library, so that its neighbors are given."""
    data = load(name)
    features = torch.from_numpy(data["features"])
    neighbors = data["neighbours"].astype(np.int64)  # codespell:ignore neighbours
    for eps in EPS:
        weights = reciprocal_weights(features, neighbors, None, ReRanking(k1=30, k2=6, variant="fastreid"))
        distances = distances_of_weights(weights, float(eps))
        assert (dbscan(distances) == data[f"labels_eps{eps}"]).all()
    rows = np.repeat(np.arange(len(features)), np.diff(distances.indptr))
    np.testing.assert_allclose(distances.data, data["jaccard"][rows, distances.indices], atol=1e-6)
    assert distances.nnz == (data["jaccard"] <= 0.7).sum()
    assert abs(distances - distances.T).nnz == 0


def naive(features, k1, k2):
    """Compute the Jaccard distances with Python sets, in float64."""
    x = torch.nn.functional.normalize(features.double(), dim=1).numpy()
    squared = np.square(x[:, None] - x[None]).sum(-1)
    order = np.argsort(squared, axis=1, kind="stable")
    k1 = min(k1, len(x))
    weights = naive_reciprocal_weights(order, squared, k1, k2, k1)
    overlap = np.minimum(weights[:, None], weights[None]).sum(-1)
    return 1 - overlap / (2 - overlap)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(1, 35),
    st.integers(1, 8),
    st.sampled_from([0.2, 0.5, 0.9]),
    st.integers(1, 6),
)
def test_clustering_equals_naive_loop_and_scikit_learn(seed, count, k1, k2, eps, min_samples):
    random = torch.Generator().manual_seed(seed)
    centers = torch.randn(5, 8, generator=random)
    features = centers[torch.randint(5, (count,), generator=random)] + 0.5 * torch.randn(count, 8, generator=random)
    options = Clustering(eps=eps, k1=k1, k2=k2, min_samples=min_samples)
    expected = naive(features, k1, k2)
    if np.abs(expected - eps).min() < 1e-5:
        return
    distances = jaccard_distances(features, options, memory_budget_mb=0.001)
    stored = distances.toarray()
    stored[~_has_entry(distances)] = np.inf
    np.testing.assert_allclose(stored, np.where(expected <= eps, expected, np.inf), atol=1e-5)
    labels = DBSCAN(eps=eps, min_samples=min_samples, metric="precomputed").fit_predict(expected.clip(0))
    assert (cluster_features(features, options) == labels).all()


def _has_entry(matrix):
    return csr_matrix((np.ones(matrix.nnz, dtype=bool), matrix.indices, matrix.indptr), matrix.shape).toarray()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([0.02, 0.05, 0.1, 0.3]), st.integers(1, 6))
def test_dbscan_equals_scikit_learn_on_random_graphs(seed, count, density, min_samples):
    """Border images with several core neighbors are frequent in random graphs."""
    random = np.random.default_rng(seed)
    near = random.random((count, count)) < density
    near |= near.T
    np.fill_diagonal(near, True)
    labels = dbscan(csr_matrix(near), min_samples=min_samples)
    expected = DBSCAN(eps=0.5, min_samples=min_samples, metric="precomputed").fit_predict(1.0 - near)
    assert (labels == expected).all()


def test_reference_set_with_fewer_images_than_k1(caplog):
    """The reference program pads with the last image; here, k1 is the number of images."""
    features = torch.from_numpy(load("tiny")["features"])
    labels = cluster_features(features, Clustering())
    assert "k1 is 20 instead of 30" in caplog.text
    expected = DBSCAN(eps=0.6, min_samples=4, metric="precomputed").fit_predict(naive(features, 20, 6).clip(0))
    assert (labels == expected).all()


def test_duplicates_are_one_cluster():
    features = torch.randn(3, 16).repeat(5, 1)
    assert cluster_features(features, Clustering(k1=5, k2=1, eps=0.1)).tolist() == [0, 1, 2] * 5


def test_float16_features_have_the_clusters_of_float32():
    features = torch.from_numpy(load("c1")["features"])
    half = cluster_features(features.half(), Clustering())
    assert (half == cluster_features(features.half().float(), Clustering())).all()


def test_quality_equals_scikit_learn():
    data = load("c1")
    labels, names = data["labels_eps0.60"], data["true_ids"].astype(str)
    quality = cluster_quality(labels, names)
    kept = labels != OUTLIER
    assert quality.nmi == pytest.approx(normalized_mutual_info_score(names[kept], labels[kept]))
    groups = [names[labels == number].tolist() for number in range(labels.max() + 1)]
    most = sum(max(map(group.count, group)) for group in groups)
    assert quality.purity == pytest.approx(most / kept.sum())
    assert quality.merged == sum(len(set(group)) > 1 for group in groups)
    assert quality.split == sum(len(set(labels[kept & (names == name)])) > 1 for name in set(names))
    assert (quality.clusters, quality.outliers, quality.images) == (len(groups), (~kept).sum(), len(labels))


def test_quality_without_clusters_identities_or_entropy():
    nothing = cluster_quality(np.full(3, OUTLIER), np.arange(3))
    assert (nothing.clusters, nothing.outliers, nothing.purity) == (0, 3, None) and "purity" not in str(nothing)
    assert cluster_quality(np.zeros(3, dtype=int)).nmi is None
    same = cluster_quality(np.zeros(3, dtype=int), np.full(3, "a"))
    assert (same.purity, same.nmi, same.split, same.merged) == (1, 1, 0, 0)


@pytest.mark.parametrize("options", [{"eps": 0}, {"eps": 1}, {"eps": 1.5}, {"eps": float("nan")}, {"k1": 0}])
def test_settings_out_of_range(options):
    with pytest.raises(ConfigError):
        Clustering(**options)


@pytest.mark.parametrize(
    "features", [torch.empty(0, 4), torch.empty(3, 0), torch.full((5, 4), float("nan")), torch.zeros(4)]
)
def test_unusable_features(features):
    with pytest.raises(DataError):
        jaccard_distances(features, Clustering())
