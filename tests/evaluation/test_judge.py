"""The whole way from features to numbers, its options together, intervals, and files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from judging import naive, random_set

from fastamp.config import get_cfg
from fastamp.config.defaults import KEYS
from fastamp.evaluation import Identities, Protocol, ReidEvaluator, judge_features
from fastamp.evaluation.neighbours import BACKENDS
from fastamp.evaluation.protocol import RULES
from fastamp.evaluation.query_expansion import SIDES
from fastamp.evaluation.reid_evaluator import ranking_device
from fastamp.evaluation.rerank import FORMS
from fastamp.layers import pairwise_distance
from fastamp.layers.distance import METRICS
from fastamp.utils.errors import ConfigError, DataError

HELPERS = Path(__file__).parents[1] / "helpers"


def protocol(*opts):
    cfg = get_cfg()
    cfg.merge_from_list(list(opts))
    return Protocol.from_config(cfg)


def test_metrics_are_those_of_a_naive_loop():
    queries, gallery, ids = random_set(0)
    ids.query_pids[3] = 99
    metrics = judge_features(queries, gallery, ids, protocol("TEST.RANKS", "[3]")).metrics()
    rows = [row for row in naive(pairwise_distance(queries, gallery, "cosine").tolist(), ids) if row[3]]
    assert metrics["mAP"] == pytest.approx(100 * np.mean([row[0] for row in rows]), abs=1e-9)
    assert metrics["mINP"] == pytest.approx(100 * np.mean([row[1] for row in rows]), abs=1e-9)
    for rank in (1, 3, 5, 10):
        assert metrics[f"Rank-{rank}"] == pytest.approx(100 * np.mean([row[2] < rank for row in rows]), abs=1e-9)
    assert (metrics["num_query"], metrics["num_gallery"]) == (30, 120)
    assert metrics["num_query_without_match"] == 30 - len(rows) >= 1


def test_intervals_hold_the_mean_and_shrink_with_the_queries():
    widths = []
    for count in (50, 800):
        queries, gallery, ids = random_set(1, queries=count, gallery=300, noise=2.0)
        judgement = judge_features(queries, gallery, ids)
        metrics = judgement.metrics()
        for name in ("mAP", "Rank-1"):
            low, high = metrics["intervals"][name]
            assert low < metrics[name] < high
        widths.append(metrics["intervals"]["mAP"][1] - metrics["intervals"]["mAP"][0])
        # The normal approximation of the mean's interval.
        ap = judgement.ranking.ap[judgement.ranking.valid]
        assert widths[-1] == pytest.approx(100 * 2 * 1.96 * (ap.std() / len(ap) ** 0.5).item(), rel=0.15)
        assert judge_features(queries, gallery, ids).intervals() == metrics["intervals"]
    assert widths[1] < widths[0] / 2
    assert "intervals" not in judge_features(queries, gallery, ids, protocol("TEST.BOOTSTRAP", "0")).metrics()


def test_everything_at_once_in_little_memory():
    queries, gallery, ids = random_set(2, queries=200, gallery=300)
    opts = ["TEST.RERANK", "on", "TEST.AQE", "on", "TEST.ROC", "on"]
    whole = judge_features(queries, gallery, ids, protocol(*opts)).metrics()
    parts = judge_features(queries, gallery, ids, protocol(*opts, "TEST.MEMORY_BUDGET_MB", "1")).metrics()
    intervals = [each.pop("intervals") for each in (whole, parts)]
    assert whole == pytest.approx(parts, abs=1e-6)
    assert intervals[0]["mAP"] == pytest.approx(intervals[1]["mAP"], abs=1e-6)


@pytest.mark.parametrize(
    "opts, words",
    [
        ([], ["cosine distance", "own camera are junk", "no re-ranking"]),
        (["TEST.METRIC", "euclidean", "TEST.PROTOCOL", "no_camera"], ["euclidean distance", "no cameras"]),
        (["TEST.RERANK", "on"], ["re-ranking (zhong, k1 20, k2 6, lambda 0.3)"]),
        (["TEST.AQE", "on", "TEST.AQE.SIDES", "query"], ["expansion of queries (k 5, alpha 3, 1 x)"]),
        (["TEST.PROTOCOL", "cuhk03", "TEST.AP", "trapezoid"], ["single gallery shot", "10 draws, seed 0", "trapezoid"]),
    ],
)
def test_the_protocol_in_one_line(opts, words):
    line = protocol(*opts).describe()
    assert "\n" not in line and all(word in line for word in words)


@pytest.mark.parametrize("key", ["RERANK", "AQE", "ROC"])
def test_what_a_drawn_gallery_cannot_have(key):
    with pytest.raises(ConfigError, match=rf"TEST.{key}.ENABLED needs one gallery.*\n.*fix: TEST.{key}"):
        protocol("TEST.PROTOCOL", "vehicleid", f"TEST.{key}", "on")
    with pytest.raises(ConfigError, match="TEST.AP trapezoid"):
        protocol("TEST.PROTOCOL", "vehicleid", "TEST.AP", "trapezoid")


@pytest.mark.parametrize(
    "rule, message",
    [
        ("market1501", "none of the 2 queries .*another camera.*fix: .*TEST.PROTOCOL no_camera"),
        ("no_camera", "no identity in common"),
        ("vehicleid", "no identity has two images"),
    ],
)
def test_no_match_at_all(rule, message):
    ids = Identities(*(torch.tensor(side) for side in ([1, 2], [3, 4], [0, 0], [1, 1])))
    with pytest.raises(DataError, match=f"(?s){message}"):
        judge_features(torch.eye(2), torch.eye(2), ids, Protocol(rule=rule))


def evaluator_with(features, cfg, folder=None):
    queries, gallery, ids = features
    evaluator = ReidEvaluator(cfg, len(queries), folder)
    images = torch.cat((queries, gallery))
    columns = {
        "targets": torch.cat((ids.query_pids, ids.gallery_pids)),
        "camids": torch.cat((ids.query_camids, ids.gallery_camids)),
        "indices": torch.arange(len(images)),
    }
    for rows in torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split(16):
        evaluator.process({name: column[rows] for name, column in columns.items()}, images[rows])
    return evaluator


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("")
    cfg = get_cfg()
    cfg.merge_from_list(["TEST.PER_QUERY", "True"])
    with pytest.raises(ConfigError, match="taken.*cannot be written: (File exists|Not a directory)"):
        evaluator_with(random_set(3), cfg, str(tmp_path / "taken")).evaluate()


def test_choices_of_keys_are_those_of_the_parts():
    choices = {
        "TEST.PROTOCOL": tuple(RULES),
        "TEST.KNN_BACKEND": BACKENDS,
        "TEST.AQE.SIDES": SIDES,
        "TEST.RERANK.FORM": FORMS,
        "TEST.METRIC": METRICS,
    }
    for key, expected in choices.items():
        assert set(KEYS[key].choices) == set(expected)
    with pytest.raises(ConfigError, match="TEST.PROTOCOL: 'market'.*Did you mean 'market1501'"):
        Protocol(rule="market")


def test_the_evaluator_puts_batches_in_order_and_writes_files(tmp_path):
    features = random_set(3)
    cfg = get_cfg()
    cfg.merge_from_list(["TEST.PER_QUERY", "True", "TEST.ROC", "on"])
    metrics = evaluator_with(features, cfg, str(tmp_path / "Some")).evaluate()
    judgement = judge_features(*features, Protocol.from_config(cfg))
    assert metrics == judgement.metrics()
    saved = np.load(tmp_path / "Some/per_query.npz")
    np.testing.assert_array_equal(saved["ap"], judgement.ranking.ap)
    assert saved["valid"].dtype == bool and saved["first_match"].shape == (30, 1)
    assert sorted(path.name for path in (tmp_path / "Some").iterdir()) == ["per_query.npz", "roc.npz", "roc.png"]
    plain = evaluator_with(features, get_cfg(), str(tmp_path / "Other"))
    plain.evaluate()
    assert not (tmp_path / "Other").exists()


@pytest.mark.parametrize("opts", [[], ["TEST.RERANK", "on"], ["TEST.AQE", "on"]])
def test_autocast_gradients_and_half_precision(opts):
    queries, gallery, ids = random_set(6)
    expected = judge_features(queries, gallery, ids, protocol(*opts)).metrics()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = judge_features(queries.clone().requires_grad_(), gallery.clone().requires_grad_(), ids, protocol(*opts))
    assert found.metrics() == expected
    half = judge_features(queries.half(), gallery.half(), ids, protocol(*opts)).metrics()
    assert half == judge_features(queries.half().float(), gallery.half().float(), ids, protocol(*opts)).metrics()


@pytest.mark.parametrize("opts", [["TEST.RERANK", "on"], ["TEST.AQE", "on"], []])
def test_what_overflows_is_an_error(opts):
    queries, gallery, ids = random_set(7)
    limit = 1e50 if opts else 1e160
    with pytest.raises(DataError, match="overflow in float"):
        judge_features(queries.double() * limit, gallery.double() * limit, ids, protocol(*opts))


def test_a_device_without_room_is_not_ranked_on(monkeypatch):
    features = torch.zeros(1000, 2048)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    for free, expected in ((10 * 2**30, "cuda"), (2**30, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        assert ranking_device(features, Protocol(), device).type == expected
    assert ranking_device(features, Protocol(), torch.device("mps")).type == "cpu"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "opts",
    [
        [],
        ["TEST.METRIC", "euclidean"],
        ["TEST.RERANK", "on", "TEST.AQE", "on"],
        ["TEST.PROTOCOL", "cuhk03", "TEST.ROC", "on"],
    ],
)
def test_the_device_and_the_cpu_give_the_same(opts):
    queries, gallery, ids = random_set(4, queries=200, gallery=2000, width=256, pids=60, noise=2.0)
    on_cpu = judge_features(queries, gallery, ids, protocol(*opts)).metrics()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # which ranking does not use
    try:
        on_device = judge_features(queries.cuda(), gallery.cuda(), ids, protocol(*opts)).metrics()
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    for name in ("mAP", "mINP", "Rank-1"):
        assert on_device[name] == pytest.approx(on_cpu[name], abs=0.01)


@pytest.mark.parametrize(
    "opts",
    [
        ["TEST.FLOORS", "True", "TEST.PER_QUERY", "True", "TEST.REPORT", "True"],
        ["TEST.METRIC", "euclidean", "TEST.RERANK", "on", "TEST.AQE", "on", "TEST.ROC", "on"],
        ["TEST.PROTOCOL", "cuhk03", "TEST.RERANK", "on", "TEST.KNN_BACKEND", "faiss"],
        ["TEST.PROTOCOL", "vehicleid"],
    ],
)
def test_two_processes_find_what_one_finds(tmp_path, opts):
    opts = [*opts, "TEST.MEMORY_BUDGET_MB", "1"]  # several blocks for each
    found = []
    for processes in (1, 2):
        path = tmp_path / str(processes) / "metrics.json"
        path.parent.mkdir()
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HELPERS)}
        command = [sys.executable, str(HELPERS / "judge_ranks.py"), str(path), str(processes), *opts]
        subprocess.run(command, check=True, env=env, timeout=300)
        found.append(json.loads(path.read_text()))
        if "TEST.PER_QUERY" in opts:
            found[-1]["ap"] = np.load(path.parent / "files/per_query.npz")["ap"].tolist()
    assert found[0] == found[1] and found[0]["mAP"] > 20
