"""Tests of the protocols of MARS: gallery with or without the query tracklets."""

import pytest
import torch
from naive_ranking import naive_rows, protocol, random_set, rows_of

from fastamp.evaluation import Identities, Protocol, compute_metrics
from fastamp.layers.distance import pairwise_distance


def test_gallery_of_mars_contains_the_queries():
    queries, gallery, ids = random_set(11)
    ids.gallery_pids[:9] = -1
    every = torch.cat((queries, gallery))
    pids, camids = torch.cat((ids.query_pids, ids.gallery_pids)), torch.cat((ids.query_camids, ids.gallery_camids))
    result = compute_metrics(queries, gallery, ids, Protocol(rule="mars", resamples=0))
    assert result.metrics()["num_gallery"] == 150
    kept = pids >= 0
    all_tracklets = Identities(ids.query_pids, pids[kept], ids.query_camids, camids[kept])
    distances = pairwise_distance(queries, every[kept], "cosine").tolist()
    for (ap, _, first, _), ranks in zip(rows_of(result.ranking), naive_rows(distances, all_tracklets), strict=True):
        pairs = [(i / (rank - 1) if rank > 1 else 1, (i + 1) / rank) for i, rank in enumerate(ranks)]
        assert ap == pytest.approx(sum(map(sum, pairs)) / 2 / len(ranks), abs=1e-12) and first == ranks[0] - 1


def test_mars_of_torchreid_equals_market1501_and_loses_matches():
    queries, gallery, ids = random_set(11)
    mine, market = (
        compute_metrics(queries, gallery, ids, Protocol(rule=rule)).ranking for rule in ("mars_torchreid", "market1501")
    )
    assert torch.equal(mine.ap, market.ap)
    ids.query_pids[:2] = torch.tensor([50, 50])
    ids.query_camids[:2] = torch.tensor([0, 1])
    valid = {rule: compute_metrics(queries, gallery, ids, Protocol(rule=rule)).ranking.valid[:2].tolist()
             for rule in ("mars", "mars_torchreid")}  # fmt: skip
    assert valid == {"mars": [True, True], "mars_torchreid": [False, False]}


def test_mars_always_uses_trapezoidal_ap():
    assert "trapezoid AP" in protocol("TEST.PROTOCOL", "mars").describe()
    assert "trapezoid" not in protocol("TEST.PROTOCOL", "mars_torchreid").describe()
