"""Tests of protocols with random galleries: equality with loops over the same trials, and with expected values."""

import numpy as np
import pytest
import torch
from naive_ranking import naive, protocol_of, random_set

from fastamp.evaluation import Identities, compute_metrics
from fastamp.layers import pairwise_distance


def evaluate(features, **options):
    return compute_metrics(*features, protocol_of(resamples=0, **options))


def rank_of(distances, images, match):
    """Return the 0-based rank of ``match`` among ``images`` sorted by distance, with ties sorted by index."""
    return sorted(images, key=lambda g: (distances[g], g)).index(match)


def test_cuhk03_cmc_equals_expectation_over_trials():
    """The expectation is over all possible galleries; the images of an identity are equally probable."""
    features = random_set(3, queries=12, gallery=14, pids=4, cameras=2)
    queries, gallery, ids = features
    distances = pairwise_distance(queries, gallery, "cosine").tolist()
    result = evaluate(features, rule="cuhk03", num_trials=4000, seed=1).ranking
    pids = ids.gallery_pids.tolist()
    for q in range(12):
        if not result.valid[q]:
            continue
        matches = [
            g for g in range(14)
            if pids[g] == ids.query_pids[q] and ids.gallery_camids[g] != ids.query_camids[q]
        ]  # fmt: skip
        first = 0.0
        for match in matches:
            probability = 1.0
            for pid in set(pids) - {int(ids.query_pids[q])}:
                images = [g for g in range(14) if pids[g] == pid]
                farther = [g for g in images if (distances[q][g], g) > (distances[q][match], match)]
                probability *= len(farther) / len(images)
            first += probability / len(matches)
        assert result.hits(1)[q].item() == pytest.approx(first, abs=0.04)


def test_cuhk03_ap_and_inp_are_computed_over_the_full_gallery():
    features = random_set(4)
    single, whole = evaluate(features, rule="cuhk03").ranking, evaluate(features).ranking
    assert torch.equal(single.ap, whole.ap) and torch.equal(single.inp, whole.inp)
    assert single.first_match.shape == (30, 10)
    assert torch.equal(single.valid, whole.valid)


def test_cuhk03_equals_market1501_with_one_gallery_image_per_identity():
    queries, gallery, ids = random_set(5, gallery=8)
    ids = Identities(ids.query_pids, torch.arange(1, 9), ids.query_camids, ids.gallery_camids)
    single, whole = evaluate((queries, gallery, ids), rule="cuhk03").ranking, evaluate((queries, gallery, ids)).ranking
    assert torch.equal(single.first_match, whole.first_match.expand(-1, 10))
    assert single.cmc(3) == whole.cmc(3)


def test_vehicleid_metrics_equal_naive_loop_over_trials():
    queries, gallery, ids = random_set(6, queries=20, gallery=30)
    images = torch.cat((queries, gallery))
    pids = torch.cat((ids.query_pids, ids.gallery_pids)).tolist()
    distances = pairwise_distance(images, images, "cosine").tolist()
    ranker = protocol_of("vehicleid", num_trials=7, seed=3).rule.ranker(ids.all_images(), "cosine")
    found = evaluate((queries, gallery, ids), rule="vehicleid", num_trials=7, seed=3)
    precisions, firsts = [], []
    for number, drawn in enumerate(ranker._drawn.tolist()):
        assert sorted(pids[g] for g in drawn) == sorted(set(pids))
        for q in sorted(set(range(50)) - set(drawn)):
            (match,) = (g for g in drawn if pids[g] == pids[q])
            rank = rank_of(distances[q], drawn, match)
            assert found.ranking.first_match[q, number] == rank
            precisions.append(1 / (rank + 1))
            firsts.append(rank == 0)
    metrics = found.metrics()
    assert metrics["mAP"] == pytest.approx(100 * np.mean(precisions), abs=1e-9) == metrics["mINP"]
    assert metrics["Rank-1"] == pytest.approx(100 * np.mean(firsts), abs=1e-9)
    assert (metrics["num_query"], metrics["num_gallery"]) == (50 - len(set(pids)), len(set(pids)))


@pytest.mark.parametrize("rule", ["cuhk03", "vehicleid"])
def test_random_galleries_depend_only_on_seed(rule):
    features = random_set(7, queries=100)
    first = evaluate(features, rule=rule, seed=1).ranking
    again = evaluate(features, rule=rule, seed=1, memory_budget_mb=0.01).ranking
    assert torch.equal(first.first_match, again.first_match) and torch.equal(first.ap, again.ap)
    assert not torch.equal(first.first_match, evaluate(features, rule=rule, seed=2).ranking.first_match)


def test_vehicleid_excludes_identities_with_one_image():
    queries, gallery, ids = random_set(8, queries=10, gallery=20)
    ids.query_pids[0] = 77
    found = evaluate((queries, gallery, ids), rule="vehicleid").ranking
    assert not found.valid[0] and found.ap[0] == 0 and found.valid[1:].any()


def test_market1501_ap_equals_naive_loop():
    queries, gallery, ids = random_set(9)
    result = compute_metrics(queries, gallery, ids).ranking
    expected = list(naive(pairwise_distance(queries, gallery, "cosine").tolist(), ids))
    assert result.ap.tolist() == pytest.approx([row[0] for row in expected], abs=1e-12)
