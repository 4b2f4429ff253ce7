"""Tests of collapse detection: warnings for collapsed features, and none for valid features."""

import numpy as np
import pytest
import torch
from naive_ranking import protocol_of, random_set

from fastamp.evaluation import Identities, Protocol, collapse, compute_metrics, print_results
from fastamp.evaluation.metrics import baseline_metrics
from fastamp.layers.distance import FeatureDistances

METRICS = ["cosine", "euclidean"]


def evaluate(queries, gallery, ids, caplog, **options):
    caplog.clear()
    metrics = compute_metrics(queries, gallery, ids, protocol_of(resamples=0, **options)).metrics()
    return metrics, caplog.text


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", ["ones", "zeros", "nearly equal", "underflow", "constant of 1e3", "random below"])
def test_evaluation_warns_if_all_features_are_equal_up_to_rounding(kind, metric, caplog):
    queries, gallery, ids = random_set(0)
    change = {
        "ones": torch.ones_like,
        "zeros": torch.zeros_like,
        "nearly equal": lambda x: 1 + 1e-8 * x,
        "underflow": lambda x: 1e-30 * x,
        "constant of 1e3": lambda x: 1e3 + 1e-5 * x,
        "random below": lambda x: 1 + 1e-6 * x,
    }[kind]
    metrics, text = evaluate(change(queries), change(gallery), ids, caplog, metric=metric)
    assert metrics["num_indistinct"] == len(queries) + len(gallery)
    assert "150" in text and metric in text and "MODEL.WEIGHTS" in text
    print_results({"x": metrics}, protocol="")
    assert "150 images with the same feature" in caplog.text


@pytest.mark.parametrize("change", [torch.ones_like, lambda features: features.round()])
def test_warning_about_a_baseline_is_not_about_the_model(change, caplog):
    queries, gallery, ids = random_set(0)
    features = [change(side[:, :2]) for side in (queries, gallery)]
    found = baseline_metrics(*features, ids, Protocol(), "raw pixels")
    assert found["num_indistinct"] and "raw pixels" in caplog.text and "fix:" in caplog.text
    assert not any(word in caplog.text for word in ("MODEL.WEIGHTS", "SOLVER.BASE_LR", "the model"))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-11, 1e-3, 1.0, 1e3, 1e15])
def test_evaluation_does_not_warn_about_normal_features_at_any_scale(metric, scale, caplog):
    queries, gallery, ids = random_set(0)
    metrics, text = evaluate(scale * queries, scale * gallery, ids, caplog, metric=metric)
    assert "num_indistinct" not in metrics and text == ""
    assert metrics["mAP"] == pytest.approx(evaluate(queries, gallery, ids, caplog, metric=metric)[0]["mAP"], abs=1e-3)


@pytest.mark.parametrize("metric", METRICS)
def test_evaluation_does_not_warn_about_similar_but_distinct_features(metric, caplog):
    """Features of an untrained model can have cosine similarities above 0.9999."""
    queries, gallery, ids = random_set(0)
    metrics, text = evaluate(1 + 5e-3 * queries, 1 + 5e-3 * gallery, ids, caplog, metric=metric)
    assert "num_indistinct" not in metrics and text == ""


def test_evaluation_does_not_warn_about_small_distances_of_float64_features(caplog):
    queries, gallery, ids = random_set(0)
    metrics, text = evaluate(1 + 1e-6 * queries.double(), 1 + 1e-6 * gallery.double(), ids, caplog)
    assert "num_indistinct" not in metrics and text == ""


def test_evaluation_warns_if_many_features_are_identical_across_identities(caplog):
    queries, gallery, ids = random_set(0)
    gallery[::4] = 0
    metrics, text = evaluate(queries, gallery, ids, caplog)
    assert metrics["num_indistinct"] == 30 and "30 of 150 features" in text


def test_evaluation_does_not_warn_about_one_identity_or_few_copied_images(caplog):
    ids = Identities(*(torch.tensor(side) for side in ([1], [1], [0], [1])))
    assert evaluate(torch.ones(1, 4), torch.ones(1, 4), ids, caplog)[1] == ""  # only one identity
    ids = Identities(*(torch.tensor(side) for side in ([1], [1, 2], [0], [1, 1])))
    assert evaluate(torch.eye(2)[:1], torch.eye(2), ids, caplog)[1] == ""
    queries, gallery, ids = random_set(0)
    gallery[0] = queries[0]  # a copy under another identity, and copies of one identity
    same = ids.gallery_pids == ids.gallery_pids[1]
    gallery[same] = gallery[1].clone()
    metrics, text = evaluate(queries, gallery, ids, caplog)
    assert "num_indistinct" not in metrics and text == ""


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("factor", [1e-6, 1e-1, 10.0])
def test_collapse_detection_bounds_the_largest_distance_within_a_factor_of_two(metric, factor, monkeypatch):
    """For squared distances, the factor is 4 instead of 2."""
    monkeypatch.setattr(collapse, "_NUM_PROBED", 1000)
    queries, gallery, _ = random_set(0)
    sides = 1 + factor * queries.double(), 1 + factor * gallery.double()
    features = torch.cat(sides)
    farthest = max(float(block.max()) for _, block in FeatureDistances(features, features, metric=metric).blocks())
    bound, *_ = collapse._largest_distance(sides, metric, torch.float64)
    assert farthest <= bound * (1 + 1e-6) and bound <= 4 * farthest * (1 + 1e-6)  # squared distances


@pytest.mark.parametrize("metric", METRICS)
def test_collapse_detection_is_independent_of_number_of_probed_features(metric, monkeypatch):
    queries, gallery, _ = random_set(0)
    verdicts = {}
    for few in (1, 3, 1000):
        monkeypatch.setattr(collapse, "_NUM_PROBED", few)
        verdicts[few] = []
        for exponent in torch.arange(-9, -1, 0.25).tolist():
            sides = 1 + 10**exponent * queries, 1 + 10**exponent * gallery
            bound, _, resolution = collapse._largest_distance(sides, metric, torch.float32)
            verdicts[few].append(bound <= resolution)
    assert verdicts[1] == verdicts[3] == verdicts[1000] and set(verdicts[1]) == {True, False}


@pytest.mark.parametrize("few", [1, 5, 1000])
def test_features_that_differ_only_in_unprobed_columns_count_as_distinct(few, monkeypatch):
    monkeypatch.setattr(collapse, "_NUM_PROBED", few)
    queries, gallery, ids = random_set(0)
    width = gallery.shape[1]
    gallery[:10, :: max(1, width // few)] = 0  # equal in the probed columns only
    gallery[10:14] = gallery[20]
    gallery[10:14, 0] = -0.0
    gallery[20, 0] = 0.0
    pids = torch.cat((ids.query_pids, ids.gallery_pids)).numpy()
    rows = torch.cat((queries, gallery)).numpy()
    equal = (rows[:, None] == rows).all(2) & (pids[:, None] != pids)
    assert collapse._equal_to_another_identity((queries, gallery), pids) == equal.any(1).sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64])
def test_distinct_features_of_few_bits_count_as_distinct(dtype, stored):
    features = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0)).to(dtype).to(stored)
    pids = np.arange(len(features))
    assert collapse._equal_to_another_identity((features[:1000], features[1000:]), pids) == 0
    features[3000] = features[0]
    assert collapse._equal_to_another_identity((features[:1000], features[1000:]), pids) == 2
