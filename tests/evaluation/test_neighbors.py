"""Tests of nearest-neighbor search: equality with a search by float64 distances for each backend."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_ranking import random_set

from fastamp.evaluation import neighbors, projected_neighbors
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.layers.distance import FeatureDistances, pair_distances
from fastamp.utils.errors import ConfigError


def exact(queries, gallery, k):
    """Return the k nearest gallery indices by float64 distance, and the largest squared distances."""
    x, y = queries.double().numpy(), gallery.double().numpy()
    distances = np.square(x[:, None] - y[None]).sum(-1)
    order = np.argsort(distances, axis=1, kind="stable")
    return order[:, :k], distances.max(1)


def test_nearest_neighbors_equal_those_of_float64_search(subtests):
    for backend, budget, k in itertools.product(["auto", "torch", "faiss"], [256, 0.01], [1, 7, 500]):
        with subtests.test(backend=backend, budget=budget, k=k):
            queries, gallery, _ = random_set(0, queries=80, gallery=300)
            found = nearest_neighbors(queries, gallery, k, backend=backend, memory_budget_mb=budget)
            indices, farthest = exact(queries, gallery, k)
            np.testing.assert_array_equal(found.indices, indices)
            np.testing.assert_allclose(found.farthest, farthest, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(2, 60), st.integers(1, 30), st.booleans(), st.sampled_from([0, 1e-7, 1e-3])
)
@example(2**32 - 1, 23, 18, True, 1e-7)
def test_torch_and_faiss_order_tied_neighbors_identically(seed, size, k, grid, shift):
    """Ties are exact copies of features, and copies that differ by less than float32 rounding."""
    random = np.random.default_rng(seed)
    features = random.integers(-1, 2, (size, 6)) if grid else random.standard_normal((size, 6))
    features = features[random.integers(0, max(1, size // 3), size)] + shift * random.standard_normal((size, 6))
    features = torch.from_numpy(features.astype(np.float32))
    expected, _ = exact(features, features, k)
    first, second = (
        nearest_neighbors(features, features, k, backend=backend, memory_budget_mb=0.001).indices
        for backend in ("torch", "faiss")
    )
    np.testing.assert_array_equal(first, second)
    if shift == 0:
        np.testing.assert_array_equal(first, expected)
    # Distances of slightly shifted copies may differ by less than float64 rounding, which depends on the summation.
    distances = np.square(features.double().numpy()[:, None] - features.double().numpy()).sum(-1)
    found, expected_distances = (np.take_along_axis(distances, indices, 1) for indices in (first, expected))
    np.testing.assert_allclose(found, expected_distances, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_one_large_feature_causes_few_float64_distance_computations(backend, monkeypatch):
    """A large feature must not increase the tolerance below which distances are computed again in float64."""
    exactly = neighbors._exact_distances
    settled = []
    monkeypatch.setattr(neighbors, "_exact_distances", lambda *args: settled.append(args[2].numel()) or exactly(*args))
    queries, gallery, _ = random_set(2, queries=80, gallery=300)
    gallery[7] *= 3000
    found = nearest_neighbors(queries, gallery, 7, backend=backend)
    np.testing.assert_array_equal(found.indices, exact(queries, gallery, 7)[0])
    assert sum(settled) < 100


def test_nearest_neighbors_of_identical_features_are_in_gallery_order(monkeypatch):
    features = torch.ones(200, 8)
    for backend, most in (("torch", 1024), ("faiss", 1024), ("torch", 50)):
        monkeypatch.setattr(neighbors, "_MAX_EXACT", most)
        found = nearest_neighbors(features, features, 5, backend=backend).indices
        np.testing.assert_array_equal(found, np.tile(np.arange(5), (200, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pair_distances_equal_sums_of_squared_differences(dtype):
    x, y, _ = random_set(1, queries=40, gallery=50)
    random = torch.Generator().manual_seed(0)
    rows, columns = torch.randint(40, (700,), generator=random), torch.randint(50, (700,), generator=random)
    found = pair_distances(x, y, rows, columns, dtype=dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, (x[rows].to(dtype) - y[columns].to(dtype)).square().sum(1))
    assert pair_distances(x, y, rows[:0], columns[:0]).shape == (0,)


def test_nearest_neighbor_search_accepts_k_zero_and_rejects_unknown_backends():
    assert nearest_neighbors(torch.ones(2, 2), torch.ones(2, 2), 0).indices.shape == (2, 0)
    with pytest.raises(ConfigError, match="TEST.KNN_BACKEND.*annoy"):
        nearest_neighbors(torch.ones(2, 2), torch.ones(2, 2), 1, backend="annoy")


def low_rank(seed, count, width, rank, noise=0.0):
    random = np.random.default_rng(seed)
    features = random.standard_normal((count, rank)) @ random.standard_normal((rank, width))
    features = features + noise * random.standard_normal((count, width))
    features = features[random.integers(0, count, count)]  # with exact copies
    return torch.from_numpy((features - features.mean(0)).astype(np.float32))


@pytest.mark.parametrize("noise", [0, 0.3, 1e-6], ids=["exact bounds", "loose bounds", "shifted copies"])
@pytest.mark.parametrize("k", [1, 12])
def test_projected_search_finds_the_neighbors_of_the_full_search(noise, k, monkeypatch):
    features = low_rank(5, 3000, 64, 9, noise)
    expected = nearest_neighbors(features[40:240], features, k).indices
    monkeypatch.setattr(neighbors, "MIN_GALLERY", 100)
    calls = []
    search = neighbors.projected_candidates
    monkeypatch.setattr(neighbors, "projected_candidates", lambda *args: calls.append(1) or search(*args))
    found = nearest_neighbors(features[40:240], features, k, farthest=False, memory_budget_mb=0.5)
    assert calls
    np.testing.assert_array_equal(found.indices, expected)
    np.testing.assert_array_equal(found.farthest, np.zeros(200))


def test_projected_search_computes_all_distances_where_bounds_exclude_too_few():
    """Axes that hold little of the features: nearly every query needs all of its distances."""
    features = torch.randn(2000, 40, generator=torch.Generator().manual_seed(3))
    distances = FeatureDistances(features, features, metric="euclidean", memory_budget_mb=0.2)
    parts = list(projected_neighbors.projected_candidates(distances, torch.eye(40)[:, :2], 5, 100, 160))
    rows, found, values = (torch.cat(blocks) for blocks in zip(*parts, strict=True))
    assert rows.tolist() == list(range(100, 160))
    expected = exact(features[100:160], features, 5)[0]
    np.testing.assert_array_equal(found.numpy(), expected)
    expected_distances = torch.cdist(features[100:160].double(), features.double()).square().sort(1).values[:, :5]
    np.testing.assert_allclose(values, expected_distances, rtol=1e-4, atol=1e-4)


def test_distances_of_projections_are_lower_bounds_and_flat_features_have_none():
    features = low_rank(6, 500, 64, 9, 0.3)
    axes = projected_neighbors.principal_axes(features)
    torch.testing.assert_close(axes.t() @ axes, torch.eye(axes.shape[1]), rtol=0, atol=1e-6)
    bounds = torch.cdist(*[projected_neighbors.project(features, axes).double()] * 2)
    full = torch.cdist(features.double(), features.double())
    assert (bounds <= full + 1e-5).all() and bounds.sum() > 0.9 * full.sum()
    flat = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    assert projected_neighbors.principal_axes(flat) is None
    assert projected_neighbors.principal_axes(torch.ones(500, 3)) is None


@pytest.mark.parametrize("width", [50, 5000, 5001, 5063])
def test_smallest_equals_topk(width):
    block = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    values, columns = projected_neighbors.smallest(block, 9)
    torch.testing.assert_close(values, block.topk(9, largest=False).values, rtol=0, atol=0)
    torch.testing.assert_close(block.gather(1, columns), values, rtol=0, atol=0)
