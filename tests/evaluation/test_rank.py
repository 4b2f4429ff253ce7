"""Tests of ranking: equality with reference implementations and with a naive loop."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_ranking import REFERENCE, load, naive, protocol_of, random_distances, random_set, rows_of

from fastamp.evaluation import Identities, compute_metrics, rank_distances
from fastamp.evaluation.identities import SAME_CAMERA, Matches
from fastamp.evaluation.rank import _ranks_on_device, ranks_of_matches
from fastamp.layers import pairwise_distance
from fastamp.layers.distance import FeatureDistances
from fastamp.utils.errors import ConfigError, DataError

VALUES = json.loads((REFERENCE / "values.json").read_text())


def check(result, name, metric):
    values = VALUES[name]
    expected = values[f"fr_{metric}_pystable"]
    if "error" in expected:  # with fewer than 50 valid gallery images only FastReID's AP and INP are correct
        expected = {key: values[f"fr_{metric}_cy"][key] for key in ("mAP", "mINP")}
    assert result.num_valid == values["num_valid"]
    assert result.mean_ap == pytest.approx(expected["mAP"], abs=1e-7)
    assert result.mean_inp == pytest.approx(expected["mINP"], abs=1e-7)
    for rank in (1, 5, 10):
        if f"R{rank}" in expected:
            assert result.cmc(rank) == pytest.approx(expected[f"R{rank}"], abs=1e-6)
    if metric == "cosine":
        exact = values["exact_cmc_cosine_stable(ours)"]
        assert [result.cmc(rank) for rank in range(1, len(exact) + 1)] == pytest.approx(exact)


CASES = [(name, metric) for name in VALUES for metric in ("euclidean", "cosine") if VALUES[name]["num_valid"]]


def rank_features(queries, gallery, ids, **options):
    return compute_metrics(queries, gallery, ids, protocol_of(**options)).ranking


def test_ranking_by_fastreid_distances_equals_fastreid_ranking(subtests):
    for name, metric in CASES:
        with subtests.test(name=name, metric=metric):
            data, _, _, ids = load(name)
            result = rank_distances(torch.from_numpy(data[f"fr_dist_{metric}"]), ids)
            check(result, name, metric)


def test_ranking_of_features_in_blocks_equals_fastreid(subtests):
    for (name, metric), memory_budget_mb in itertools.product(CASES, [1e-9, 0.01, 1000]):
        with subtests.test(name=name, metric=metric, memory_budget_mb=memory_budget_mb):
            data, qf, gf, ids = load(name)
            distances = pairwise_distance(qf, gf, metric)
            distances = distances.square() if metric == "euclidean" else distances  # FastReID ranks by the square
            torch.testing.assert_close(distances, torch.from_numpy(data[f"fr_dist_{metric}"]), rtol=1e-4, atol=1e-5)
            result = rank_features(qf, gf, ids, metric=metric, memory_budget_mb=memory_budget_mb)
            if (name, metric, memory_budget_mb) != ("g7_ties", "cosine", 1e-9):  # depends on the last bit of a distance
                check(result, name, metric)


def test_ranking_without_valid_queries_has_zero_ap_and_no_first_match():
    data, _, _, ids = load("g5_single_camera")
    result = rank_distances(torch.from_numpy(data["fr_dist_cosine"]), ids)
    assert result.num_valid == 0
    assert result.first_match.eq(-1).all() and result.ap.eq(0).all()


@pytest.mark.parametrize("name, metric", [case for case in CASES if case[0][:2] in ("g1", "g4", "g7")])
def test_ap_equals_fastreid_and_trapezoidal_ap_equals_market1501_code(name, metric):
    data, _, _, ids = load(name)
    distances = torch.from_numpy(data[f"fr_dist_{metric}"])
    result = rank_distances(distances, ids)
    np.testing.assert_allclose(result.ap[result.valid], data[f"fr_{metric}_pystable_ap"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.inp[result.valid], data[f"fr_{metric}_pystable_inp"], rtol=0, atol=1e-12)
    if metric == "euclidean" and name != "g7_ties":  # its sort was not stable
        trapezoid = rank_distances(distances, ids, trapezoid=True)
        np.testing.assert_allclose(
            trapezoid.ap[trapezoid.valid], data["trapezoid_ap_euclidean_junk_removed"], rtol=0, atol=1e-12
        )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_ranking_equals_naive_loop_with_ties_junk_and_distractors(seed, num_query, num_gallery, levels):
    distances, ids = random_distances(seed, num_query, num_gallery, levels)
    for ours, expected in zip(rows_of(rank_distances(distances, ids)), naive(distances.tolist(), ids), strict=True):
        assert ours == pytest.approx(expected, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(200, 900),
    st.sampled_from([2, 50, 10**6]),
    st.sampled_from([3, 30, 300]),
    st.sampled_from([np.float32, np.float64]),
)
def test_ranking_of_large_gallery_equals_naive_loop(seed, num_gallery, levels, pids, dtype):
    """Galleries of these sizes cover both counting the images before a match and sorting those up to the last match."""
    distances, ids = random_distances(seed, 4, num_gallery, levels, dtype, pids)
    distances[seed % 4][ids.gallery_pids == ids.query_pids[seed % 4]] /= 100  # matches of one query are close
    before = distances.clone()
    result = rank_distances(distances, ids)
    assert torch.equal(distances, before)
    for ours, expected in zip(rows_of(result), naive(distances.tolist(), ids), strict=True):
        assert ours == pytest.approx(expected, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([2, 10**6]))
def test_ranks_from_tensor_operations_equal_ranks_from_cpu_code(seed, num_gallery, levels):
    distances, ids = random_distances(seed, 5, num_gallery, levels)
    pairs = Matches(ids, junk=SAME_CAMERA).pairs(0, 5)
    distances[pairs.junk_rows, pairs.junk_columns] = torch.nan
    np.testing.assert_array_equal(
        _ranks_on_device(distances, pairs.rows, pairs.columns),
        ranks_of_matches(distances, pairs.rows, pairs.columns),
    )


def test_gallery_images_at_infinite_distance_rank_last():
    ids = Identities(*(torch.tensor(side) for side in ([1], [1, 2, 1, 1, 3], [0], [1, 1, 0, 1, 1])))
    distances = torch.tensor([[torch.inf, torch.inf, torch.inf, 0.5, 1.0]])  # the third is junk
    for ours, expected in zip(rows_of(rank_distances(distances, ids)), naive(distances.tolist(), ids), strict=True):
        assert ours == pytest.approx(expected, abs=1e-12)


def test_ranking_raises_for_distances_with_wrong_shape_or_nan():
    distances, ids = random_distances(2, 5, 60, 20)
    with pytest.raises(DataError, match=r"\(5, 60\).*\(5, 59\)"):
        rank_distances(distances[:, 1:], ids)
    with pytest.raises(DataError, match="1 of 300.*NaN"):
        rank_distances(distances.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(torch.nan)), ids)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16])
def test_ranking_accepts_integer_and_half_precision_distances(dtype):
    distances, ids = random_distances(3, 5, 60, 20)
    assert torch.equal(rank_distances(distances.to(dtype), ids).ap, rank_distances(distances, ids).ap)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_blocks_of_feature_distances_equal_the_full_distance_matrix(metric, dtype):
    queries, gallery, _ = random_set(0, queries=150, gallery=99)
    queries, gallery = queries.to(dtype), (3 * gallery).to(dtype)
    expected = pairwise_distance(queries, gallery, metric)
    expected = expected.square() if metric == "euclidean" else expected
    # 0.05 MiB is too little for a normalized copy of the gallery, and 0.001 for two rows.
    for budget, rows in ((100, 150), (0.05, 128 if expected.itemsize == 4 else 64), (0.001, 2)):
        distances = FeatureDistances(queries, gallery, metric=metric, memory_budget_mb=budget)
        pieces = [(start, block.clone()) for start, block in distances.blocks()]
        assert max(len(block) for _, block in pieces) == min(rows, distances.block_rows)
        assert distances.block_rows == 1 or distances.block_rows * 99 * expected.itemsize <= budget * 2**20
        assert [start for start, _ in pieces] == list(range(0, 150, distances.block_rows))
        whole = torch.cat([block for _, block in pieces])
        assert whole.dtype == expected.dtype and whole.max() <= (distances.limit or torch.inf)
        torch.testing.assert_close(whole, expected)
    assert [start for start, _ in distances.blocks(3, 3)] == []


def test_ranking_is_independent_of_memory_budget():
    queries, gallery, ids = random_set(1, queries=300, gallery=400)
    whole = rank_features(queries, gallery, ids)
    parts = rank_features(queries, gallery, ids, memory_budget_mb=0.2)
    assert torch.equal(whole.ap, parts.ap) and torch.equal(whole.first_match, parts.first_match)


def test_cmc_at_ranks_beyond_gallery_size_is_one():
    data, _, _, ids = load("g8_gallery_lt_50")
    result = rank_distances(torch.from_numpy(data["fr_dist_cosine"]), ids)
    assert result.cmc(10_000) == 1.0


def test_float16_features_are_ranked_in_float32():
    _, qf, gf, ids = load("g1_small_junk")
    half = rank_features(qf.half(), gf.half(), ids)
    full = rank_features(qf.half().float(), gf.half().float(), ids)
    assert torch.equal(half.ap, full.ap)


def test_feature_ranking_rejects_invalid_features_and_unknown_metrics():
    _, qf, gf, ids = load("g1_small_junk")
    with pytest.raises(ConfigError, match="TEST.METRIC.*'cosin'"):
        rank_features(qf, gf, ids, metric="cosin")
    with pytest.raises(DataError, match="gallery"):
        rank_features(qf, gf[:0], ids)
    with pytest.raises(DataError, match="query"):
        rank_features(qf[1:], gf, ids)
    with pytest.raises(DataError, match="64.*63"):
        rank_features(qf, gf[:, 1:], ids)
    with pytest.raises(DataError, match="query.*0"):
        rank_features(qf[:, :0], gf[:, :0], ids)
    with pytest.raises(DataError, match=r"gallery.*1e\+160.*float64"):
        rank_features(qf.double(), gf.double() * 0 + 1e160, ids)
    with pytest.raises(DataError, match=r"gallery.*1e\+20.*float32"):
        rank_features(qf, gf * 0 + 1e20, ids)
    bad = gf.clone()
    bad[7, 0] = float("nan")
    with pytest.raises(DataError, match=r"gallery.*1 of \d+.*7"):
        rank_features(qf, bad, ids)
