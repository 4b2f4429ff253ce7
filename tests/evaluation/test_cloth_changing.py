"""Tests of the protocols of cloth-changing datasets, against the reference program and a naive loop."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from naive_ranking import protocol_of, random_set

from fastamp.evaluation import Identities, compute_metrics
from fastamp.evaluation.trials import draw_images
from fastamp.layers.distance import pairwise_distance
from fastamp.utils.errors import DataError

REFERENCE = Path(__file__).parents[1] / "reference/methods"
DATA = np.load(REFERENCE / "cc_eval1.npz")
RESULTS = json.loads((REFERENCE / "cc_eval1_results.json").read_text())
RANKS = tuple(range(1, 21))


def labels(side):
    return torch.from_numpy(DATA[f"{side}_pid_cam_clothes"]).unbind(1)


def evaluate(rule):
    (query_pids, query_camids, worn), (gallery_pids, gallery_camids, others) = labels("query"), labels("gallery")
    identities = Identities(query_pids, gallery_pids, query_camids, gallery_camids, {"clothes": (worn, others)})
    features = (torch.from_numpy(DATA[f"{side}_features"]).double() for side in ("query", "gallery"))
    return compute_metrics(*features, identities, protocol_of(rule, ranks=RANKS, resamples=0)).metrics()


@pytest.mark.parametrize(
    "rule, name",
    [("market1501", "general"), ("same_clothes", "same_clothes"), ("cloth_changing", "clothes_changing")],
)
def test_clothes_protocols_equal_reference(rule, name):
    metrics = evaluate(rule)
    assert metrics["mAP"] / 100 == pytest.approx(RESULTS[name]["mAP"], abs=1e-9)
    assert [metrics[f"Rank-{rank}"] / 100 for rank in RANKS] == pytest.approx(DATA[f"{name}_cmc"].tolist(), abs=1e-9)


def prcc(rule, queries):
    sides = {side: torch.from_numpy(DATA[f"prcc_{side}_features"]).double() for side in (queries, "A")}
    pids = {side: torch.from_numpy(DATA[f"prcc_{side}_pids"]) for side in sides}
    cameras = torch.zeros_like(pids[queries]), torch.ones_like(pids["A"])
    identities = Identities(pids[queries], pids["A"], *cameras)
    return compute_metrics(sides[queries], sides["A"], identities, protocol_of(rule, resamples=0)).metrics()


@pytest.mark.parametrize("queries, name", [("B", "prcc_same"), ("C", "prcc_changing")])
def test_prcc_protocols_equal_reference(queries, name):
    single, multi = prcc("prcc", queries), prcc("prcc_multi_shot", queries)
    for metrics, expected in (
        (single, RESULTS[f"{name}_single_shot_mean_of_10"]),
        (multi, RESULTS[f"{name}_multi_shot"]),
    ):
        assert metrics["mAP"] / 100 == pytest.approx(expected["mAP"], abs=1e-9)
        assert metrics["Rank-1"] / 100 == pytest.approx(expected["R1"], abs=1e-9)
    assert single["num_gallery"] == 20 and multi["num_gallery"] == 67


def test_prcc_galleries_are_those_of_the_reference_program():
    generator = random.Random(3)
    pids = DATA["prcc_A_pids"]
    for expected in DATA["prcc_single_shot_index"]:
        assert draw_images(pids, None, shots=1, generator=generator).tolist() == expected.tolist()


@pytest.mark.parametrize("rule", ["cloth_changing", "same_clothes"])
def test_clothes_protocols_equal_a_naive_loop(rule):
    queries, gallery, ids = random_set(9)
    generator = torch.Generator().manual_seed(0)
    worn, others = (torch.randint(0, 3, (size,), generator=generator) for size in (30, 120))
    ids = Identities(
        ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids, {"clothes": (worn, others)}
    )
    found = compute_metrics(queries, gallery, ids, protocol_of(rule)).ranking
    distances = pairwise_distance(queries, gallery, "cosine").tolist()
    for q, row in enumerate(distances):
        kept = []
        for g in sorted(range(120), key=lambda g: (row[g], g)):
            is_same = worn[q] == others[g]
            is_junk = ids.query_camids[q] == ids.gallery_camids[g] or is_same == (rule == "cloth_changing")
            if ids.query_pids[q] != ids.gallery_pids[g] or not is_junk:
                kept.append(int(ids.gallery_pids[g] == ids.query_pids[q]))
        ranks = np.flatnonzero(kept) + 1
        expected = np.mean(np.arange(1, len(ranks) + 1) / ranks) if len(ranks) else 0
        assert found.ap[q].item() == pytest.approx(expected, abs=1e-12)


def test_missing_clothes_are_an_error_except_for_distractors():
    queries, gallery, ids = random_set(9)
    worn, others = torch.zeros(30, dtype=torch.int64), torch.arange(120) % 2
    others[ids.gallery_pids == 0] = -1
    sides = (ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids)
    compute_metrics(queries, gallery, Identities(*sides, {"clothes": (worn, others)}), protocol_of("cloth_changing"))
    worn[4] = others[ids.gallery_pids.argmax()] = -1
    with pytest.raises(DataError, match=r"cloth_changing.*\n?.*\b1 .*\b1 "):
        identities = Identities(*sides, {"clothes": (worn, others)})
        compute_metrics(queries, gallery, identities, protocol_of("cloth_changing"))
