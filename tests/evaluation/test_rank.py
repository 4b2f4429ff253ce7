"""The ranking against other programs' values and a naive loop."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastamp.evaluation.rank import Identities, rank_distances, rank_features
from fastamp.layers import pairwise_distance
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = Path(__file__).parents[1] / "reference/ranking"
VALUES = json.loads((REFERENCE / "values.json").read_text())


def load(name):
    data = np.load(REFERENCE / f"{name}.npz")
    tensors = {key: torch.from_numpy(data[key]) for key in ("qf", "gf", "qp", "gp", "qc", "gc")}
    ids = Identities(*(tensors[key].long() for key in ("qp", "gp", "qc", "gc")))
    return data, tensors["qf"], tensors["gf"], ids


def check(result, name, metric):
    values = VALUES[name]
    expected = values[f"fr_{metric}_pystable"]
    if "error" in expected:  # fewer valid gallery images than 50: there only FastReID's AP and INP are right
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


@pytest.mark.parametrize("name, metric", CASES)
def test_equals_fastreid_on_its_own_distances(name, metric):
    data, _, _, ids = load(name)
    result = rank_distances(torch.from_numpy(data[f"fr_dist_{metric}"]), ids)
    check(result, name, metric)


@pytest.mark.parametrize("name, metric", CASES)
@pytest.mark.parametrize("memory_budget_mb", [1e-9, 0.01, 1000])
def test_features_in_blocks_equal_fastreid(name, metric, memory_budget_mb):
    data, qf, gf, ids = load(name)
    distances = pairwise_distance(qf, gf, metric)
    distances = distances.square() if metric == "euclidean" else distances  # FastReID ranks by the square
    torch.testing.assert_close(distances, torch.from_numpy(data[f"fr_dist_{metric}"]), rtol=1e-4, atol=1e-5)
    result = rank_features(qf, gf, ids, metric=metric, memory_budget_mb=memory_budget_mb)
    if (name, metric, memory_budget_mb) != ("g7_ties", "cosine", 1e-9):  # there the last bit of a distance decides
        check(result, name, metric)


def test_without_any_valid_query():
    data, _, _, ids = load("g5_single_camera")
    result = rank_distances(torch.from_numpy(data["fr_dist_cosine"]), ids)
    assert result.num_valid == 0
    assert result.first_match.eq(-1).all() and result.ap.eq(0).all()


def naive(distances, ids):
    for q in range(len(distances)):
        order = sorted(range(len(distances[q])), key=lambda g: (distances[q][g], g))
        kept = [
            g
            for g in order
            if not (ids.gallery_pids[g] == ids.query_pids[q] and ids.gallery_camids[g] == ids.query_camids[q])
        ]
        ranks = [i for i, g in enumerate(kept, start=1) if ids.gallery_pids[g] == ids.query_pids[q]]
        if not ranks:
            yield 0.0, 0.0, -1, False
            continue
        precisions = [(i + 1) / rank for i, rank in enumerate(ranks)]
        yield sum(precisions) / len(ranks), len(ranks) / ranks[-1], ranks[0] - 1, True


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4))
def test_equals_a_naive_loop_with_ties_junk_and_distractors(seed, num_query, num_gallery, levels):
    rng = np.random.default_rng(seed)
    distances = torch.from_numpy(rng.integers(0, levels, (num_query, num_gallery)).astype(np.float32))
    ids = Identities(
        torch.from_numpy(rng.integers(1, 4, num_query)),
        torch.from_numpy(rng.integers(0, 4, num_gallery)),
        torch.from_numpy(rng.integers(0, 3, num_query)),
        torch.from_numpy(rng.integers(0, 3, num_gallery)),
    )
    result = rank_distances(distances, ids)
    rows = zip(
        result.ap.tolist(), result.inp.tolist(), result.first_match[:, 0].tolist(), result.valid.tolist(), strict=True
    )
    for ours, expected in zip(rows, naive(distances.tolist(), ids), strict=True):
        assert ours == pytest.approx(expected, abs=1e-12)


def test_cmc_beyond_the_gallery_carries_the_last_value_on():
    data, _, _, ids = load("g8_gallery_lt_50")
    result = rank_distances(torch.from_numpy(data["fr_dist_cosine"]), ids)
    assert result.cmc(10_000) == 1.0


def test_half_precision_features_are_ranked_in_float32():
    _, qf, gf, ids = load("g1_small_junk")
    half = rank_features(qf.half(), gf.half(), ids)
    full = rank_features(qf.half().float(), gf.half().float(), ids)
    assert torch.equal(half.ap, full.ap)


def test_bad_input():
    _, qf, gf, ids = load("g1_small_junk")
    with pytest.raises(ConfigError, match="'cosin' is no distance"):
        rank_features(qf, gf, ids, metric="cosin")
    with pytest.raises(DataError, match="the gallery set is empty"):
        rank_features(qf, gf[:0], ids)
    with pytest.raises(DataError, match="do not fit"):
        rank_features(qf[1:], gf, ids)
    with pytest.raises(DataError, match="of two models"):
        rank_features(qf, gf[:, 1:], ids)
    bad = gf.clone()
    bad[7, 0] = float("nan")
    with pytest.raises(DataError, match=r"1 of \d+ gallery features are NaN or infinite \(the first: number 7"):
        rank_features(qf, bad, ids)
