"""Tests of compute_metrics: combined options, confidence intervals, precision and errors."""

import numpy as np
import pytest
import torch
from naive_ranking import naive, protocol, protocol_of, random_set

from fastamp.evaluation import Identities, check_evaluable, compute_metrics
from fastamp.layers import pairwise_distance
from fastamp.utils.errors import DataError, NoMatchError


def test_evaluation_metrics_equal_naive_loop():
    queries, gallery, ids = random_set(0)
    ids.query_pids[3] = 99
    metrics = compute_metrics(queries, gallery, ids, protocol("TEST.RANKS", "[3]")).metrics()
    rows = [row for row in naive(pairwise_distance(queries, gallery, "cosine").tolist(), ids) if row[3]]
    assert metrics["mAP"] == pytest.approx(100 * np.mean([row[0] for row in rows]), abs=1e-9)
    assert metrics["mINP"] == pytest.approx(100 * np.mean([row[1] for row in rows]), abs=1e-9)
    for rank in (1, 3, 5, 10):
        assert metrics[f"Rank-{rank}"] == pytest.approx(100 * np.mean([row[2] < rank for row in rows]), abs=1e-9)
    assert (metrics["num_query"], metrics["num_gallery"]) == (30, 120)
    assert metrics["num_query_without_match"] == 30 - len(rows) >= 1


def test_confidence_intervals_contain_mean_and_narrow_with_more_queries():
    widths = []
    for count in (50, 800):
        queries, gallery, ids = random_set(1, queries=count, gallery=300, noise=2.0)
        result = compute_metrics(queries, gallery, ids)
        metrics = result.metrics()
        for name in ("mAP", "Rank-1"):
            low, high = metrics["intervals"][name]
            assert low < metrics[name] < high
        widths.append(metrics["intervals"]["mAP"][1] - metrics["intervals"]["mAP"][0])
        # Normal approximation of the confidence interval of the mean.
        ap = result.ranking.ap[result.ranking.valid]
        assert widths[-1] == pytest.approx(100 * 2 * 1.96 * (ap.std() / len(ap) ** 0.5).item(), rel=0.15)
        assert compute_metrics(queries, gallery, ids).intervals() == metrics["intervals"]
    assert widths[1] < widths[0] / 2
    assert "intervals" not in compute_metrics(queries, gallery, ids, protocol("TEST.BOOTSTRAP", "0")).metrics()


def test_metrics_with_reranking_expansion_and_roc_are_independent_of_memory_budget():
    queries, gallery, ids = random_set(2, queries=200, gallery=300)
    opts = ["TEST.RERANK", "on", "TEST.AQE", "on", "TEST.ROC", "on"]
    whole = compute_metrics(queries, gallery, ids, protocol(*opts)).metrics()
    parts = compute_metrics(queries, gallery, ids, protocol(*opts, "TEST.MEMORY_BUDGET_MB", "1")).metrics()
    intervals = [metrics.pop("intervals") for metrics in (whole, parts)]
    assert whole == pytest.approx(parts, abs=1e-6)
    assert intervals[0]["mAP"] == pytest.approx(intervals[1]["mAP"], abs=1e-6)


@pytest.mark.parametrize(
    "rule, gallery, message, suggests_no_camera",
    [
        ("market1501", [3, 4], "2 queries", False),
        ("market1501", [1, 2], "2 queries", True),
        ("no_camera", [3, 4], "2 queries", False),
        ("vehicleid", [3, 4], "4 images", False),
    ],
)
def test_evaluation_raises_if_no_query_has_a_match(rule, gallery, message, suggests_no_camera):
    ids = Identities(*(torch.tensor(side) for side in ([1, 2], gallery, [0, 0], [0, 0])))
    with pytest.raises(NoMatchError, match=message) as error:
        compute_metrics(torch.eye(2), torch.eye(2), ids, protocol_of(rule))
    assert ("no_camera" in str(error.value)) == suggests_no_camera
    with pytest.raises(NoMatchError) as by_labels:
        check_evaluable(ids, protocol_of(rule))
    assert str(by_labels.value) == str(error.value)


@pytest.mark.parametrize("rule", ["market1501", "no_camera", "vehicleid", "cuhk03", "recall_at_k"])
def test_one_match_is_enough(rule):
    check_evaluable(Identities(*(torch.tensor(side) for side in ([1, 2], [2, 4], [0, 0], [1, 1]))), protocol_of(rule))


@pytest.mark.parametrize("opts", [[], ["TEST.RERANK", "on"], ["TEST.AQE", "on"]])
def test_metrics_are_unchanged_inside_autocast_and_for_float16_features(opts):
    queries, gallery, ids = random_set(6)
    expected = compute_metrics(queries, gallery, ids, protocol(*opts)).metrics()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tracked = queries.clone().requires_grad_(), gallery.clone().requires_grad_()
        found = compute_metrics(*tracked, ids, protocol(*opts)).metrics()
    assert found == expected
    half = compute_metrics(queries.half(), gallery.half(), ids, protocol(*opts)).metrics()
    assert half == compute_metrics(queries.half().float(), gallery.half().float(), ids, protocol(*opts)).metrics()


@pytest.mark.parametrize("opts", [["TEST.RERANK", "on"], ["TEST.AQE", "on"], []])
def test_evaluation_raises_if_squared_feature_distances_overflow(opts):
    queries, gallery, ids = random_set(7)
    limit = 1e50 if opts else 1e160
    with pytest.raises(DataError, match="overflow"):
        compute_metrics(queries.double() * limit, gallery.double() * limit, ids, protocol(*opts))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "opts",
    [
        [],
        ["TEST.METRIC", "euclidean"],
        ["TEST.RERANK", "on", "TEST.AQE", "on"],
        ["TEST.PROTOCOL", "cuhk03", "TEST.ROC", "on"],
    ],
)
def test_metrics_on_cuda_equal_metrics_on_cpu(opts):
    queries, gallery, ids = random_set(4, queries=200, gallery=2000, width=256, pids=60, noise=2.0)
    on_cpu = compute_metrics(queries, gallery, ids, protocol(*opts)).metrics()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # ranking must not use it
    try:
        on_device = compute_metrics(queries.cuda(), gallery.cuda(), ids, protocol(*opts)).metrics()
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for name in ("mAP", "mINP", "Rank-1"):
        assert on_device[name] == pytest.approx(on_cpu[name], abs=0.01)
