"""Query expansion against FastReID's values and a naive loop."""

import numpy as np
import pytest
import torch
from naive_ranking import REFERENCE, load, random_set

from fastamp.evaluation import Protocol, compute_metrics
from fastamp.evaluation.query_expansion import QueryExpansion, expand
from fastamp.utils.errors import ConfigError

NAMES = sorted(path.stem for path in REFERENCE.glob("*.npz"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "g7_ties"])  # where the sort decides
@pytest.mark.parametrize("times, k, alpha", [(1, 5, 3), (2, 10, 3), (1, 10, 0)])
@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_equals_fastreid(name, times, k, alpha, backend):
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
def test_sides_and_any_real_alpha(alpha):
    queries, gallery, _ = random_set(0)
    new_queries, same = expand(queries, gallery, QueryExpansion(alpha=alpha, target="query"))
    assert torch.equal(same, gallery)
    torch.testing.assert_close(new_queries, naive(queries, gallery, 5, alpha, own=True))
    same, new_gallery = expand(queries, gallery, QueryExpansion(alpha=alpha, target="gallery"))
    assert torch.equal(same, queries)
    torch.testing.assert_close(new_gallery, naive(gallery, gallery, 5, alpha, own=False))


def test_a_query_expanded_alone_does_not_depend_on_the_others():
    queries, gallery, _ = random_set(1)
    options = QueryExpansion(target="query", times=2)
    together, _ = expand(queries, gallery, options)
    alone, _ = expand(queries[3:4], gallery, options)
    torch.testing.assert_close(together[3:4], alone)


def test_negative_similarities_and_tiny_sets():
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [0.0, -1.0]])
    for alpha in (0, 0.5, 1, 2.5, -2):
        for sides in ("both", "query", "gallery"):
            both = expand(features[:1], features[1:], QueryExpansion(k=10, alpha=alpha, target=sides))
            assert all(torch.isfinite(side).all() for side in both)


def test_what_does_not_exist_and_what_overflows():
    with pytest.raises(ConfigError, match=r"TEST.AQE.TARGET: 'queries'.*Did you mean 'query'"):
        QueryExpansion(target="queries")
    with pytest.raises(ConfigError, match="QE_K 0"):
        QueryExpansion(k=0)
    queries, gallery, ids = random_set(3)
    with pytest.raises(ConfigError, match="TEST.AQE.ALPHA -12: similarities to this power overflow"):
        compute_metrics(queries, gallery, ids, Protocol(expansion=QueryExpansion(alpha=-12, k=60)))
    for alpha in (1e9, 1e300):
        result = compute_metrics(queries, gallery, ids, Protocol(expansion=QueryExpansion(alpha=alpha))).ranking
        assert result.ap.max() <= 1 and result.inp.max() <= 1


def test_one_feature_in_the_mean_is_the_feature():
    queries, gallery, _ = random_set(4)
    for sides in ("both", "query", "gallery"):
        found = expand(queries, gallery, QueryExpansion(k=1, target=sides))
        torch.testing.assert_close(found, (queries, gallery))


def test_improves_clustered_features():
    queries, gallery, ids = random_set(2, queries=60, gallery=400, pids=20, noise=1.0)
    plain = compute_metrics(queries, gallery, ids).ranking.mean_ap
    for sides in ("both", "query", "gallery"):
        better = compute_metrics(queries, gallery, ids, Protocol(expansion=QueryExpansion(target=sides))).ranking
        assert better.mean_ap > plain + 0.02
