"""Features that cannot be told apart are reported; sets that are normal, tiny or full of copies are not."""

import pytest
import torch
from judging import random_set

from fastamp.evaluation import Identities, Protocol, judge_features, print_results
from fastamp.layers.distance import FeatureDistances

METRICS = ["cosine", "euclidean"]


def judged(queries, gallery, ids, caplog, **options):
    caplog.clear()
    metrics = judge_features(queries, gallery, ids, Protocol(resamples=0, **options)).metrics()
    return metrics, caplog.text


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", ["ones", "zeros", "nearly equal", "underflow", "constant of 1e3", "random below"])
def test_collapsed_features_are_reported(kind, metric, caplog):
    queries, gallery, ids = random_set(0)
    change = {
        "ones": torch.ones_like,
        "zeros": torch.zeros_like,
        "nearly equal": lambda x: 1 + 1e-8 * x,
        "underflow": lambda x: 1e-30 * x,
        "constant of 1e3": lambda x: 1e3 + 1e-5 * x,
        "random below": lambda x: 1 + 1e-6 * x,
    }[kind]
    metrics, text = judged(change(queries), change(gallery), ids, caplog, metric=metric)
    assert metrics["num_indistinct"] == len(queries) + len(gallery)
    assert "all 150 features are the same" in text and "fix:" in text
    caplog.set_level("INFO")
    print_results({"x": metrics}, protocol="")
    assert "150 images with a feature equal to another identity's" in caplog.text


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-11, 1e-3, 1.0, 1e3, 1e15])
def test_normal_features_are_not_reported_at_any_scale(metric, scale, caplog):
    queries, gallery, ids = random_set(0)
    metrics, text = judged(scale * queries, scale * gallery, ids, caplog, metric=metric)
    assert "num_indistinct" not in metrics and text == ""
    assert metrics["mAP"] == pytest.approx(judged(queries, gallery, ids, caplog, metric=metric)[0]["mAP"], abs=1e-3)


@pytest.mark.parametrize("metric", METRICS)
def test_features_that_differ_little_but_can_be_ranked_are_not_reported(metric, caplog):
    """As those of an untrained model: cosines of 0.9999 and more."""
    queries, gallery, ids = random_set(0)
    metrics, text = judged(1 + 5e-3 * queries, 1 + 5e-3 * gallery, ids, caplog, metric=metric)
    assert "num_indistinct" not in metrics and text == ""


def test_small_distances_in_float64_are_resolved(caplog):
    queries, gallery, ids = random_set(0)
    metrics, text = judged(1 + 1e-6 * queries.double(), 1 + 1e-6 * gallery.double(), ids, caplog)
    assert "num_indistinct" not in metrics and text == ""


def test_a_model_that_has_partly_collapsed(caplog):
    queries, gallery, ids = random_set(0)
    gallery[::4] = 0
    metrics, text = judged(queries, gallery, ids, caplog)
    assert metrics["num_indistinct"] == 30 and "30 of 150 features equal" in text


def test_tiny_sets_and_copies_are_not_reported(caplog):
    ids = Identities(*(torch.tensor(side) for side in ([1], [1], [0], [1])))
    assert judged(torch.ones(1, 4), torch.ones(1, 4), ids, caplog)[1] == ""  # one identity: nothing to tell apart
    ids = Identities(*(torch.tensor(side) for side in ([1], [1, 2], [0], [1, 1])))
    assert judged(torch.eye(2)[:1], torch.eye(2), ids, caplog)[1] == ""
    queries, gallery, ids = random_set(0)
    gallery[0] = queries[0]  # a copy under another identity, and copies of one identity
    same = ids.gallery_pids == ids.gallery_pids[1]
    gallery[same] = gallery[1].clone()
    metrics, text = judged(queries, gallery, ids, caplog)
    assert "num_indistinct" not in metrics and text == ""


@pytest.mark.parametrize("metric", METRICS)
def test_the_bound_holds_for_every_pair(metric, caplog):
    """What is reported has indeed no distance above the resolution; the negative control has."""
    queries, gallery, _ = random_set(0)
    for factor, collapsed in ((1e-6, True), (1e-1, False)):
        distances = FeatureDistances(1 + factor * queries, 1 + factor * gallery, metric=metric)
        block = next(distances.blocks())[1]
        resolution = 4 * torch.finfo(torch.float32).eps * (1 if metric == "cosine" else float(queries.shape[1]))
        assert (float(block.max() - block.min()) <= 4 * resolution) is collapsed
