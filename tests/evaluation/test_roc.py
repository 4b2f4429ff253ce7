"""Tests of verification: equality with counted pairs and with scikit-learn."""

import json
import sys

import numpy as np
import pytest
import torch
from naive_ranking import REFERENCE, load, protocol_of, random_set

from fastamp.evaluation import Protocol, compute_metrics
from fastamp.evaluation.roc import write_roc
from fastamp.layers import pairwise_distance
from fastamp.utils.errors import ConfigError

VALUES = json.loads((REFERENCE / "values.json").read_text())
RATES = (1e-4, 1e-3, 1e-2, 0.1, 0.5)


def roc_of(queries, gallery, ids, **options):
    return compute_metrics(queries, gallery, ids, protocol_of(resamples=0, false_accept_rates=RATES, **options)).roc


# In g7 a genuine and an impostor distance differ only in the last bit.
NAMES = [name for name in VALUES if VALUES[name].get("pairs", {}).get("pos") and name != "g7_ties"]


@pytest.mark.parametrize("name", NAMES)
def test_roc_curve_equals_scikit_learn(name):
    _, queries, gallery, ids = load(name)
    curve = roc_of(queries, gallery, ids)
    pairs = VALUES[name]["pairs"]
    assert (curve.num_genuine, curve.num_impostor) == (pairs["pos"], pairs["neg"])
    expected = VALUES[name]["sklearn_TAR@FAR_cosine_conventional(max TPR with FPR<=q)"]
    for rate in RATES[:3]:
        assert curve.tar_at(rate) == pytest.approx(expected[f"{rate:.0e}"], abs=1e-9)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("budget", [256, 0.01])
def test_roc_curve_equals_fractions_of_counted_pairs(metric, budget):
    queries, gallery, ids = random_set(0)
    curve = roc_of(queries, gallery, ids, metric=metric, memory_budget_mb=budget)
    distances = pairwise_distance(queries, gallery, metric)
    same = ids.query_pids[:, None] == ids.gallery_pids
    junk = same & (ids.query_camids[:, None] == ids.gallery_camids)
    genuine, impostor = distances[same & ~junk], distances[~same]
    assert (curve.num_genuine, curve.num_impostor) == (len(genuine), len(impostor))
    for rate in RATES:
        thresholds = [-1.0, *distances.flatten().tolist()]
        best = max((genuine <= t).double().mean().item() for t in thresholds if (impostor <= t).double().mean() <= rate)
        assert curve.tar_at(rate) == pytest.approx(best, abs=1e-9)
    assert (np.diff(curve.tar) >= 0).all() and (np.diff(curve.far) >= 0).all()
    assert curve.tar[-1] == curve.far[-1] == 1 and (curve.tar - curve.far).mean() > 0


def test_true_accept_rate_is_one_for_separable_identities():
    """The negative control inverts the similarities."""
    queries, gallery, ids = random_set(1, noise=0.01)
    assert roc_of(queries, gallery, ids).tar_at(1e-4) == 1.0
    exchanged = roc_of(-queries, gallery, ids)
    assert exchanged.tar_at(1e-4) == exchanged.tar_at(1e-2) == 0.0


def test_single_large_feature_does_not_reduce_roc_resolution():
    queries, gallery, ids = random_set(5, queries=100, gallery=400)
    ids.gallery_pids[0], ids.query_pids[0] = 0, 99
    expected = [roc_of(queries, gallery, ids, metric="euclidean").tar_at(rate) for rate in RATES]
    gallery[0] *= 3000
    queries[0] *= 3000
    found = [roc_of(queries, gallery, ids, metric="euclidean").tar_at(rate) for rate in RATES]
    assert found == pytest.approx(expected, abs=0.02)
    assert expected[2] > 0.1


def test_roc_curve_is_valid_for_zero_and_tiny_features():
    queries, gallery, ids = random_set(6)
    expected = roc_of(queries, gallery, ids, metric="euclidean")
    tiny = roc_of(queries * 1e-12, gallery * 1e-12, ids, metric="euclidean")
    assert tiny.tar_at(0.1) == pytest.approx(expected.tar_at(0.1), abs=0.01)
    assert roc_of(queries * 0, gallery * 0, ids, metric="euclidean").tar_at(0.5) == 0.0


def test_roc_curve_is_valid_with_reranking_and_without_cameras():
    from fastamp.evaluation.rerank import ReRanking

    queries, gallery, ids = random_set(2)
    for variant in ("zhong", "torchreid", "fastreid"):
        for metric in ("cosine", "euclidean"):
            curve = roc_of(queries, gallery, ids, re_ranking=ReRanking(variant=variant), metric=metric)
            assert curve.tar_at(0.5) > 0.9 and curve.far[-1] == 1
    assert roc_of(queries, gallery, ids, rule="no_camera").num_genuine > curve.num_genuine


def test_roc_curve_is_written_to_npz_and_png_files(tmp_path):
    queries, gallery, ids = random_set(3)
    curve = roc_of(queries, gallery, ids)
    paths = write_roc(curve, RATES, tmp_path / "new")
    assert [path.name for path in paths] == ["roc.npz", "roc.png"]
    saved = np.load(paths[0])
    np.testing.assert_array_equal(saved["tar"], curve.tar)
    assert saved["num_impostor"] == curve.num_impostor and paths[1].read_bytes()[1:4] == b"PNG"


def test_roc_plot_is_skipped_without_matplotlib(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paths = write_roc(roc_of(*random_set(3)), RATES, tmp_path)
    assert [path.name for path in paths] == ["roc.npz"] and 'pip install "fastamp[vis]"' in caplog.text


def test_protocol_with_roc_and_random_gallery_raises():
    with pytest.raises(ConfigError, match="TEST.ROC.ENABLED"):
        protocol_of("vehicleid", false_accept_rates=RATES)


def test_roc_curve_is_none_without_impostor_pairs(caplog):
    queries, gallery, ids = random_set(4, pids=1)
    ids.gallery_pids.fill_(1)
    result = compute_metrics(queries, gallery, ids, Protocol(false_accept_rates=RATES))
    assert "TEST.ROC" in caplog.text
    assert result.roc is None and not any("TAR" in name for name in result.metrics())
    assert torch.isfinite(torch.tensor(result.metrics()["mAP"]))
