"""Tests of re-ranking: equality with reference implementations and with a naive loop."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_ranking import REFERENCE, load, naive_reciprocal_weights, random_set

from fastamp.evaluation import Protocol, compute_metrics
from fastamp.evaluation.rerank import ReRankedDistances, ReRanking, _JointDistances
from fastamp.layers.distance import FeatureDistances
from fastamp.utils.errors import ConfigError

NAMES = sorted(path.stem for path in REFERENCE.glob("*.npz"))


def final(queries, gallery, *, metric="cosine", backend="auto", budget=256, **options):
    distances = ReRankedDistances(
        queries, gallery, metric=metric, options=ReRanking(**options), backend=backend, memory_budget_mb=budget
    )
    return torch.cat([block.clone() for _, block in distances.blocks()])


# With ties (g7) the neighbors depend on the sort.
def test_reranking_equals_reference_implementations(subtests):
    """The tolerance for the authors' implementation is larger because it computes in float16."""
    cases = [("torchreid", "tr_rerank", 1e-5), ("fastreid", "fr_rerank_final", 1e-5), ("zhong", "sb_rerank", 4e-3)]
    names = [name for name in NAMES if name != "g7_ties"]
    assert names
    for name, backend, budget, (variant, key, tolerance) in itertools.product(
        names, ["torch", "faiss"], [256, 0.001], cases
    ):
        with subtests.test(name=name, backend=backend, budget=budget, variant=variant):
            data, queries, gallery, _ = load(name)
            found = final(queries, gallery, variant=variant, backend=backend, budget=budget)
            np.testing.assert_allclose(found, data[key], rtol=0, atol=tolerance)


def naive(queries, gallery, k1, k2, lambda_value, variant):
    """Compute equations 1 to 12 of the paper with Python sets, in float64."""
    x = torch.nn.functional.normalize(torch.cat((queries, gallery)).double(), dim=1).numpy()
    squared = np.square(x[:, None] - x[None]).sum(-1)
    order = np.argsort(squared, axis=1, kind="stable")
    scaled = squared if variant == "fastreid" else squared / squared.max(1, keepdims=True)
    scaled = scaled**2 if variant == "torchreid" else scaled
    weights = naive_reciprocal_weights(order, scaled, k1, k2, k1 if variant == "fastreid" else k1 + 1)
    n = len(queries)
    overlap = np.minimum(weights[:n, None], weights[None, n:]).sum(-1)
    original = squared[:n, n:] / 2 if variant == "fastreid" else scaled[:n, n:]  # 1 - cosine is half the square
    return (1 - overlap / (2 - overlap)) * (1 - lambda_value) + original * lambda_value


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["zhong", "torchreid", "fastreid"]),
    st.integers(1, 25),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_reranking_equals_naive_loop(seed, variant, k1, k2, lambda_value):
    queries, gallery, _ = random_set(seed, queries=5, gallery=25, pids=4)
    expected = naive(queries, gallery, k1, k2, lambda_value, variant)
    found = final(queries, gallery, variant=variant, k1=k1, k2=k2, lambda_value=lambda_value)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_reranking_increases_map_equally_with_torch_and_faiss():
    queries, gallery, ids = random_set(0, queries=60, gallery=400, pids=20, noise=1.0)
    plain = compute_metrics(queries, gallery, ids).ranking.mean_ap
    ranked = [
        compute_metrics(queries, gallery, ids, Protocol(re_ranking=ReRanking(), backend=backend)).ranking
        for backend in ("torch", "faiss")
    ]
    assert ranked[0].mean_ap > plain + 0.05
    assert torch.equal(ranked[0].ap, ranked[1].ap)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("num_queries, num_gallery", [(70, 130), (1, 199), (199, 1)])
def test_kept_distances_do_not_change_the_result(metric, num_queries, num_gallery):
    """A budget of 0 MiB keeps no distances and computes one row at a time."""
    features = torch.randn(num_queries + num_gallery, 16, generator=torch.Generator().manual_seed(0))
    queries, gallery = features.split((num_queries, num_gallery))
    results, kept = [], []
    for budget in (0, 256):
        blocks = ReRankedDistances(
            queries, gallery, metric=metric, options=ReRanking(k1=8, k2=3), memory_budget_mb=budget
        )
        kept.append(blocks._kept)
        results.append(torch.cat([block.clone() for _, block in blocks.blocks()]))
    assert kept[0] is None and kept[1] is not None
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_joint_distances_equal_distances_of_all_pairs(subtests):
    for num_queries, (start, stop) in itertools.product([0, 3, 10], [(0, 10), (0, 3), (2, 4), (3, 10), (9, 10)]):
        with subtests.test(num_queries=num_queries, start=start, stop=stop):
            features = torch.randn(10, 5)
            known = FeatureDistances(features[:num_queries], features[num_queries:], metric="euclidean")
            query_to_gallery = torch.empty(known.shape)
            known.rows(0, num_queries, query_to_gallery)
            found = torch.full((stop - start, 10), torch.nan)
            _JointDistances(features, query_to_gallery, metric="euclidean").rows(start, stop, found)
            torch.testing.assert_close(
                found, torch.cdist(features, features)[start:stop].square(), rtol=1e-5, atol=1e-5
            )


def test_reranking_is_finite_with_more_identical_features_than_neighbors():
    """With many copies, an image may not be among its own k nearest neighbors."""
    features = torch.zeros(60, 4)
    features[30:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for metric in ("cosine", "euclidean"):
        found = final(features[::2], features[1::2], metric=metric, k1=5)
        assert torch.isfinite(found).all()
        assert found[:15, :15].max() < found[:15, 15:].min()


def test_euclidean_reranking_is_invariant_to_an_offset_of_all_features():
    queries, gallery, _ = random_set(3)
    expected = final(queries, gallery, metric="euclidean")
    for backend in ("torch", "faiss"):
        found = final(queries + 1000, gallery + 1000, metric="euclidean", backend=backend)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_invalid_reranking_options_raise():
    queries, gallery, _ = random_set(4)
    for options, message in (
        ({"variant": "zong"}, "Did you mean 'zhong'"),
        ({"k2": 0}, "K2 0"),
        ({"lambda_value": 2}, "LAMBDA 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            ReRanking(**options)
    with pytest.raises(ConfigError, match="TEST.METRIC.*'cosin'"):
        final(queries, gallery, metric="cosin")


def test_reranking_accepts_float16_and_does_not_modify_features():
    queries, gallery, _ = random_set(2)
    before = queries.clone(), gallery.clone()
    final(queries, gallery)
    assert torch.equal(queries, before[0]) and torch.equal(gallery, before[1])
    half = final(queries.half(), gallery.half())
    torch.testing.assert_close(half, final(queries.half().float(), gallery.half().float()))
