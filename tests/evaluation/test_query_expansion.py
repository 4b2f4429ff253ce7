"""Tests of query expansion: equality with FastReID and with a naive loop."""

import itertools

import numpy as np
import pytest
import torch
from naive_ranking import REFERENCE, load, random_set

from fastamp.evaluation import Protocol, compute_metrics
from fastamp.evaluation.query_expansion import QueryExpansion, expand
from fastamp.utils.errors import ConfigError

NAMES = sorted(path.stem for path in REFERENCE.glob("*.npz"))


def test_query_expansion_equals_fastreid(subtests):
    names = [name for name in NAMES if name != "g7_ties"]  # depends on the sort
    assert names
    for name, (times, k, alpha), backend in itertools.product(
        names, [(1, 5, 3), (2, 10, 3), (1, 10, 0)], ["torch", "faiss"]
    ):
        with subtests.test(name=name, times=times, k=k, alpha=alpha, backend=backend):
            data, queries, gallery, _ = load(name)
            options = QueryExpansion(k=k, alpha=alpha, times=times)
            found = expand(queries, gallery, options, backend=backend, memory_budget_mb=0.01)
            for side, ours in zip("qg", found, strict=True):
                np.testing.assert_allclose(ours, data[f"fr_aqe_{times}_{k}_{alpha}_{side}"], rtol=0, atol=1e-6)


def naive(features, pool, k, alpha, *, own):
    similarities = torch.nn.functional.normalize(features, dim=1) @ torch.nn.functional.normalize(pool, dim=1).t()
    rows = []
    for i, row in enumerate(similarities):
        near = sorted(range(len(pool)), key=lambda g: -row[g])[: k - own]
        total = sum((max(row[g].item(), 0) ** alpha * pool[g] for g in near), torch.zeros(pool.shape[1]))
        rows.append((total + own * features[i]) / (len(near) + own))
    return torch.stack(rows)


@pytest.mark.parametrize("alpha", [0.5, 2.5, 3.0, -1.5])
def test_expansion_of_only_queries_or_gallery_equals_naive_loop(alpha):
    queries, gallery, _ = random_set(0)
    new_queries, same = expand(queries, gallery, QueryExpansion(alpha=alpha, target="query"))
    assert torch.equal(same, gallery)
    torch.testing.assert_close(new_queries, naive(queries, gallery, 5, alpha, own=True))
    same, new_gallery = expand(queries, gallery, QueryExpansion(alpha=alpha, target="gallery"))
    assert torch.equal(same, queries)
    torch.testing.assert_close(new_gallery, naive(gallery, gallery, 5, alpha, own=False))


def test_expanded_query_is_independent_of_other_queries():
    queries, gallery, _ = random_set(1)
    options = QueryExpansion(target="query", times=2)
    together, _ = expand(queries, gallery, options)
    single, _ = expand(queries[3:4], gallery, options)
    torch.testing.assert_close(together[3:4], single)


def test_query_expansion_is_finite_for_negative_similarities_and_large_k():
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [0.0, -1.0]])
    for alpha in (0, 0.5, 1, 2.5, -2):
        for target in ("both", "query", "gallery"):
            both = expand(features[:1], features[1:], QueryExpansion(k=10, alpha=alpha, target=target))
            assert all(torch.isfinite(side).all() for side in both)


def test_query_expansion_rejects_invalid_options_and_overflowing_weights():
    with pytest.raises(ConfigError, match="TEST.AQE.TARGET.*'queries'.*'query'"):
        QueryExpansion(target="queries")
    with pytest.raises(ConfigError, match="QE_K.*0"):
        QueryExpansion(k=0)
    queries, gallery, ids = random_set(3)
    with pytest.raises(ConfigError, match="TEST.AQE.ALPHA -12"):
        compute_metrics(queries, gallery, ids, Protocol(expansion=QueryExpansion(alpha=-12, k=60)))
    for alpha in (1e9, 1e300):
        result = compute_metrics(queries, gallery, ids, Protocol(expansion=QueryExpansion(alpha=alpha))).ranking
        assert result.ap.max() <= 1 and result.inp.max() <= 1


def test_query_expansion_with_k_1_does_not_change_features():
    queries, gallery, _ = random_set(4)
    for target in ("both", "query", "gallery"):
        found = expand(queries, gallery, QueryExpansion(k=1, target=target))
        torch.testing.assert_close(found, (queries, gallery))


def test_query_expansion_increases_map_on_clustered_features():
    queries, gallery, ids = random_set(2, queries=60, gallery=400, pids=20, noise=1.0)
    plain = compute_metrics(queries, gallery, ids).ranking.mean_ap
    for target in ("both", "query", "gallery"):
        better = compute_metrics(queries, gallery, ids, Protocol(expansion=QueryExpansion(target=target))).ranking
        assert better.mean_ap > plain + 0.02
