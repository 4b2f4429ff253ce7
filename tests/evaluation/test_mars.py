"""Tests of the protocol of MARS."""

import pytest
import torch
from naive_ranking import naive_rows, protocol, protocol_of, random_set, rows_of

from fastamp.evaluation import Identities, compute_metrics
from fastamp.layers.distance import pairwise_distance


def test_mars_equals_a_naive_loop_over_a_gallery_with_the_queries():
    queries, gallery, ids = random_set(11)
    ids.gallery_pids[:9] = -1
    every = torch.cat((queries, gallery))
    pids, camids = torch.cat((ids.query_pids, ids.gallery_pids)), torch.cat((ids.query_camids, ids.gallery_camids))
    all_tracklets = Identities(ids.query_pids, pids, ids.query_camids, camids)
    found = compute_metrics(queries, every, all_tracklets, protocol_of("mars")).ranking
    kept = pids >= 0
    without_junk = Identities(ids.query_pids, pids[kept], ids.query_camids, camids[kept])
    distances = pairwise_distance(queries, every[kept], "cosine").tolist()
    for (ap, _, first, _), ranks in zip(rows_of(found), naive_rows(distances, without_junk), strict=True):
        pairs = [(i / (rank - 1) if rank > 1 else 1, (i + 1) / rank) for i, rank in enumerate(ranks)]
        assert ap == pytest.approx(sum(map(sum, pairs)) / 2 / len(ranks), abs=1e-12) and first == ranks[0] - 1


def test_mars_always_uses_trapezoidal_ap():
    assert "trapezoid AP" in protocol("TEST.PROTOCOL", "mars").describe()
