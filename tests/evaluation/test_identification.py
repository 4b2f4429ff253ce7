"""Tests of the metrics of identification, against reference numbers and naive loops."""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fastamp.evaluation import identification
from fastamp.utils.errors import DataError

REFERENCE = Path(__file__).parents[1] / "reference/methods"


@pytest.mark.parametrize("name", ["animals_metrics1", "animals_metrics_int"])
def test_metrics_equal_reference_numbers(name):
    data = json.loads((REFERENCE / f"{name}.json").read_text())
    expected = data["results"]
    true, predicted, new = data["y_true_with_new_merged"], data["y_pred"], data["new_class"]
    known, unknown = (
        function(data["y_true"], predicted, data["identities_only_in_test"], new)
        for function in (identification.baks, identification.baus)
    )
    found = {
        name: getattr(identification, name)(true, predicted, new)
        for name in ("accuracy", "balanced_accuracy", "class_average_accuracy", "precision", "recall", "f1")
    }
    found |= {
        "recall_ignore_empty": identification.recall(true, predicted, new, ignore_empty=True),
        "accuracy_known_samples": identification.accuracy_known(true, predicted, new),
        "accuracy_unknown_samples": identification.accuracy_unknown(true, predicted, new),
        "auc_roc_new_class": identification.auc_new([label == new for label in true], data["score"]),
        "BAKS": known,
        "BAUS": unknown,
        "geometric_mean_BAKS_BAUS": identification.geometric_mean(known, unknown),
        "mean_average_precision_at5": identification.mean_average_precision_at_k(
            data["ranked_true"], data["ranked_pred"]
        ),
    }
    for weight in (0.25, 0.5, 0.75):
        found[f"normalized_accuracy_mu{weight:.2f}"] = identification.normalized_accuracy(
            true, predicted, new, known_weight=weight
        )
    top = {k: identification.top_k_accuracy(data["ranked_true"], data["ranked_pred"], k) for k in (1, 3, 5)}
    assert top == pytest.approx({int(k): value for k, value in expected.pop("top_k").items()}, abs=1e-9)
    assert found == pytest.approx(expected, abs=1e-9)


def test_balanced_accuracies_equal_naive_loops_with_integers_and_the_text_new():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 9, 200)
    predicted = [int(label) if chance < 0.6 else "new" for label, chance in zip(true, rng.random(200), strict=True)]
    hits, misses = defaultdict(list), defaultdict(list)
    for label, guess in zip(true.tolist(), predicted, strict=True):
        if label in (7, 8):
            misses[label].append(guess == "new")
        else:
            hits[label].append(guess == label)
    found = identification.baks(true, predicted, [7, 8]), identification.baus(true, predicted, [7, 8])
    for value, by_identity in zip(found, (hits, misses), strict=True):
        assert value == pytest.approx(np.mean([np.mean(values) for values in by_identity.values()]), abs=1e-12)


def test_auc_equals_naive_loop_with_ties():
    rng = np.random.default_rng(1)
    is_new, scores = rng.random(60) < 0.3, rng.integers(0, 8, 60)
    pairs = [(a < b) + (a == b) / 2 for a in scores[is_new] for b in scores[~is_new]]
    assert identification.auc_new(is_new, scores) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_metrics_over_nothing_are_nan():
    assert math.isnan(identification.baus(["a"], ["a"], []))
    assert math.isnan(identification.baks(["a"], ["new"], ["a"]))
    assert identification.baus(["a"], ["new"], ["a"]) == 1
    assert math.isnan(identification.accuracy([], []))
    assert math.isnan(identification.balanced_accuracy([], []))
    assert math.isnan(identification.f1([], []))
    assert math.isnan(identification.normalized_accuracy(["a"], ["a"]))
    assert math.isnan(identification.auc_new([True], [0.1]))
    assert math.isnan(identification.auc_new([False], [0.1]))
    assert math.isnan(identification.geometric_mean(float("nan"), 1.0))
    assert math.isnan(identification.mean_average_precision_at_k([], []))


def test_average_precision_divides_by_the_hits_within_the_list():
    assert identification.average_precision_at_k("a", ["b", "a", "b", "a"]) == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert identification.average_precision_at_k("a", ["b"]) == 0


@pytest.mark.parametrize("true, predicted", [(["a", 1], ["a", "a"]), (["1"], [1]), ([None], ["a"]), (["a"], [])])
def test_labels_of_mixed_types_or_numbers_are_an_error(true, predicted):
    with pytest.raises(DataError):
        identification.accuracy(true, predicted)


@pytest.mark.parametrize("true, unknown", [([1, 2], ["2"]), (["1", "2"], [2]), (["ab", "b"], "b"), ([1], [None])])
def test_unknown_of_another_type_than_the_labels_is_an_error(true, unknown):
    for function in (identification.baks, identification.baus):
        with pytest.raises(DataError, match="fix:"):
            function(true, ["new"] * len(true), unknown)
    assert identification.baus(["new", "a"], ["new", "new"], ["a"], "new") == 1


@pytest.mark.parametrize("ranked", [["1", "2"], [None], [1.0]])
def test_ranked_labels_of_another_type_are_an_error(ranked):
    with pytest.raises(DataError, match="fix:"):
        identification.average_precision_at_k(1, ranked)
    with pytest.raises(DataError, match="fix:"):
        identification.top_k_accuracy([1], [ranked], 1)


def test_top_k_accuracy_needs_a_positive_k():
    assert identification.top_k_accuracy(["a"], [["b", "a"]], 50) == 1
    with pytest.raises(DataError, match="fix:"):
        identification.top_k_accuracy(["a"], [["b", "a"]], -1)


@pytest.mark.parametrize("scores", [[0.5, float("nan")], [0.5], []])
def test_scores_that_are_missing_are_an_error(scores):
    with pytest.raises(DataError, match="fix:"):
        identification.auc_new([True, False], scores)
    assert identification.auc_new([True, False], [float("-inf"), float("inf")]) == 1


def test_numpy_labels_are_the_same_as_python_labels():
    assert identification.accuracy(np.array(["a", "b"]), ["a", "new"], "new") == 0.5
    assert identification.accuracy(np.array([3, 4], dtype=np.int32), [3, 4]) == 1
