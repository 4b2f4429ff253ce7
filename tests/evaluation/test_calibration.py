"""Tests of open-set decisions: thresholds, error rates on other identities, intervals, state and invalid input."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from look_alikes import identities_of, look_alikes
from scipy import stats

from fastamp.evaluation import Identities
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.error_rates import difference_interval
from fastamp.evaluation.open_set import SetScores
from fastamp.evaluation.thresholds import calibrate, split_identities
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = Path(__file__).parents[1] / "reference" / "demo_features.npz"
RATES = {"far": 0.01, "frr": 0.1, "fpir": 0.1}


def calibrated(seed=0, count=120, images=4, **options):
    features, identities = look_alikes(count, images, seed)
    return calibrate(features, identities, **{"metric": "cosine", "seed": seed, **RATES, **options})


def naive_rates(features, identities, same, different, search):
    """Naive reference: errors and trials of every pair and query, for similarities without junk of the same camera."""
    unit = features / features.norm(dim=1, keepdim=True)
    pids, camids = identities.query_pids.tolist(), identities.query_camids.tolist()
    counts = {name: [0, 0] for name in ("far", "frr", "undecided_impostor", "undecided_genuine", "fpir", "fnir")}

    def count(name, error):
        counts[name][0] += error
        counts[name][1] += 1

    for i in range(len(pids)):
        others, matches = [], []
        for j in range(len(pids)):
            score = float(unit[i] @ unit[j])
            if pids[i] != pids[j]:
                others.append(score)
                if i < j:
                    count("far", score >= same)
                    count("undecided_impostor", different <= score < same)
            elif camids[i] != camids[j]:
                matches.append(score)
                if i < j:
                    count("frr", score < different)
                    count("undecided_genuine", different <= score < same)
        count("fpir", max(others) >= search)
        if matches:
            count("fnir", max(matches) < search)
    return counts


def test_error_rates_equal_those_of_a_naive_loop():
    features, identities = look_alikes(12, 3, seed=3)
    camids = identities.query_camids % 2  # the images 0 and 2 of each identity are from the same camera
    identities = Identities(identities.query_pids, identities.query_pids, camids, camids)
    scores = SetScores(features, identities, metric="cosine")
    found = scores.rates(0.5, 0.3, 0.6, np.ones(36, dtype=bool))
    for name, (errors, trials) in naive_rates(features, identities, 0.5, 0.3, 0.6).items():
        measured = getattr(found, name)
        assert (measured.num_errors, measured.num_trials) == (errors, trials), name
        assert measured.rate == pytest.approx(errors / trials) and measured.low <= measured.rate <= measured.high
    assert found.gallery_size == 33 and len(scores.genuine) == 24 and len(scores.impostor) == 36 * 33 / 2


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_thresholds_are_the_wanted_quantiles_on_the_identities_that_choose(metric):
    features, identities = look_alikes(120, 4, seed=0)
    found = calibrate(features, identities, metric=metric, **RATES | {"far": 0.002})
    chosen = found.chosen
    assert 0.0019 < chosen.far.rate <= 0.002 and 0.09 < chosen.frr.rate <= 0.1 and 0.09 < chosen.fpir.rate <= 0.1
    first, second = split_identities(identities.query_pids.numpy(), 0.5, 0)
    assert not {*first} & {*second} and len(first) == len(second) == 60
    assert found.gallery_size == 59 * 4 and chosen.far.num_identities == 60
    rows = np.isin(identities.query_pids, second)
    part = Identities(*(labels[rows] for labels in (identities.query_pids,) * 2 + (identities.query_camids,) * 2))
    unit = features[rows] / features[rows].norm(dim=1, keepdim=True) if metric == "cosine" else features[rows]
    scores = unit @ unit.T if metric == "cosine" else torch.cdist(unit, unit)
    decisions = [[found.decide(float(score)) for score in row] for row in scores]
    different = part.query_pids[:, None] != part.query_pids
    accepted = np.array(decisions) == "same"
    assert accepted[different].mean() == pytest.approx(found.measured.far.rate, abs=1e-4)
    rejected = np.array(decisions)[(~different & ~torch.eye(len(scores), dtype=bool)).numpy()] == "different"
    assert rejected.mean() == pytest.approx(found.measured.frr.rate, abs=1e-4)


def test_unknown_zone_is_empty_if_the_classes_are_separable():
    features, identities = look_alikes(120, 4, seed=0)
    centers = torch.nn.functional.one_hot(identities.query_pids, 120).float()
    found = calibrate(torch.cat((9 * centers, features), 1), identities, metric="cosine", **RATES)
    assert found.same_threshold == found.different_threshold
    assert {found.decide(score) for score in np.linspace(-1, 1, 99)} == {"same", "different"}
    assert found.measured.undecided_genuine.rate == 0


SPLITS = range(20)


def coverage(features, identities, *, interval=difference_interval):
    """Count the splits in which the interval of the difference of the measured and the stated rate contains 0."""
    covered = {"far": 0, "frr": 0, "fpir": 0}
    for seed in SPLITS:
        found = calibrate(features, identities, metric="cosine", seed=seed, **RATES)
        for name in covered:
            stated, measured = getattr(found.chosen, name), getattr(found.measured, name)
            assert stated.rate <= getattr(found, name)
            low, high = interval(measured, stated)
            covered[name] += low <= 0 <= high
    return covered


def demo_features():
    """Load features of a ResNet-18 trained on the demo set: 200 other generated people with 4 images.

    They are the first 48 principal components of the features of `fastamp demo` for the people of ``generate_demo``
    with seed 2.
    """
    with np.load(REFERENCE) as file:
        features, pids, camids = (torch.from_numpy(file[name]) for name in ("features", "pids", "camids"))
    return features.float(), Identities(pids.long(), pids.long(), camids.long(), camids.long())


@pytest.fixture(params=["generated", "network"])
def many_identities(request):
    return look_alikes(400, 4, seed=1) if request.param == "generated" else demo_features()


@pytest.mark.integration
def test_measured_rates_agree_with_stated_rates_over_20_splits(many_identities):
    covered = coverage(*many_identities)
    assert min(covered.values()) >= 18, covered  # 18 is the 2nd percentile of a binomial with 0.95 and 20 trials
    assert covered["far"] >= 19


def test_measured_rates_agree_with_stated_rates_over_20_sets():
    covered = {"far": 0, "frr": 0, "fpir": 0}
    for seed in SPLITS:  # independent sets, unlike splits of the same identities
        found = calibrated(seed, count=200)
        for name in covered:
            low, high = difference_interval(getattr(found.measured, name), getattr(found.chosen, name))
            covered[name] += low <= 0 <= high
    assert min(covered.values()) >= 18, covered


def of_independent_pairs(measured, stated):
    """Negative control: intervals that ignore that pairs share identities."""
    first, second = (
        dataclasses.replace(point, low=interval.low, high=interval.high)
        for point in (measured, stated)
        for interval in [stats.binomtest(point.num_errors, point.num_trials).proportion_ci(method="wilson")]
    )
    return difference_interval(first, second)


@pytest.mark.integration
def test_intervals_of_independent_pairs_do_not_cover_the_stated_rate(many_identities):
    covered = coverage(*many_identities, interval=of_independent_pairs)
    assert covered["far"] <= 12 and covered["fpir"] <= 16, covered


def test_thresholds_of_training_identities_do_not_keep_the_stated_rate():
    # Training pulls the images of an identity together and identities apart, which other identities do not share.
    for seed in range(3):
        features, identities = look_alikes(400, 4, seed=seed)
        trained, _ = split_identities(identities.query_pids.numpy(), 0.5, seed)
        is_trained = torch.from_numpy(np.isin(identities.query_pids, trained))
        one_hot = torch.nn.functional.one_hot(identities.query_pids, 400).float() * is_trained[:, None]
        found = calibrate(torch.cat((3 * one_hot, features), 1), identities, metric="cosine", seed=seed, **RATES)
        low, _ = difference_interval(found.measured.far, found.chosen.far)
        assert low > 0 and found.measured.far.rate > 2 * found.far


def test_false_positive_identification_rate_grows_with_the_gallery():
    small, large = (calibrated(count=300, gallery_size=size) for size in (60, 590))
    assert small.gallery_size < 65 and 580 < large.gallery_size <= 596
    assert small.search_threshold < large.search_threshold
    assert small.same_threshold == large.same_threshold
    assert small.expected_fpir(small.gallery_size) == pytest.approx(small.fpir)
    assert small.expected_fpir(2 * small.gallery_size) == pytest.approx(1 - (1 - small.fpir) ** 2)


@pytest.mark.integration
def test_expected_rate_bounds_the_rate_with_a_larger_gallery():
    rates, expected = [], []
    for seed in range(10):
        small = calibrated(seed, count=300, gallery_size=150)
        features, identities = look_alikes(300, 4, seed)
        scores = SetScores(features, identities, metric="cosine")
        everyone = np.ones(len(scores.pids), dtype=bool)
        found = scores.rates(1.0, 0.0, small.search_threshold, everyone)
        rates.append(found.fpir.rate)
        expected.append(small.expected_fpir(found.gallery_size))
    assert 2 * RATES["fpir"] < np.mean(rates) < np.mean(expected)


def test_split_does_not_depend_on_the_order_of_the_images():
    pids = np.arange(50).repeat(2)
    first, second = split_identities(pids, 0.3, seed=4)
    again, _ = split_identities(np.append(np.random.default_rng(0).permutation(pids), -1), 0.3, seed=4)
    assert len(first) == 15 and (first == again).all() and {*first} | {*second} == {*range(50)}
    assert set(first) != set(split_identities(pids, 0.3, seed=5)[0])


def test_large_sets_are_sampled_evenly_over_the_identities(monkeypatch):
    monkeypatch.setattr("fastamp.evaluation.open_set._MAX_IMAGES", 100)
    features, identities = look_alikes(20, 20, seed=0)
    scores = SetScores(features, identities, metric="cosine")
    assert np.bincount(scores.pids).tolist() == [5] * 20


@pytest.mark.parametrize("method", ["isotonic", "logistic"])
def test_probabilities_are_reliable_on_other_identities(method):
    features, identities = look_alikes(300, 4, seed=2)
    found = calibrate(features, identities, metric="cosine", method=method, **RATES)
    _, others = split_identities(identities.query_pids.numpy(), 0.5, 0)
    reliability = SetScores(features, identities, metric="cosine", only=others).reliability(found.curve)
    assert reliability.error < 0.05
    assert (np.diff(reliability.predicted) > 0).all() and len(reliability.observed) >= 5
    half = found.curve.scores[np.searchsorted(found.curve.probabilities, 0.5)]
    assert found.probability(half) == pytest.approx(0.5, abs=0.1)
    assert found.probability(half, prior=0.01) < 0.05


def test_state_is_restored_and_loads_with_weights_only(tmp_path):
    found = calibrated(np.int64(3), far=np.float64(0.01))
    torch.save(found.state_dict(), tmp_path / "calibration.pth")
    state = torch.load(tmp_path / "calibration.pth", weights_only=True)
    again = Calibration.from_state(state)
    assert again.measured == found.measured and again.describe() == found.describe()
    assert again.probability(0.3) == found.probability(0.3)
    json.dumps({name: value for name, value in state.items() if not isinstance(value, torch.Tensor)})


def test_damaged_state_is_rejected(subtests):
    cases = [
        {"far": 0.0},
        {"same_threshold": float("nan")},
        {"gallery_size": 0},
        {"metric": 3},
        {"measured": None},
        {"scores": torch.tensor([1.0, 0.0])},
        {"unknown": 1},
        {"scores": torch.empty(0), "probabilities": torch.empty(0)},
        {"scores": torch.zeros(2).to_sparse()},
        {"probabilities": torch.tensor([0.0, 1.0])},
        {"same_threshold": 10**400},
        {"seed": "x"},
        {"fraction": 2.0},
    ]
    for change in cases:
        with subtests.test(change=change):
            state = calibrated(count=80).state_dict()
            with pytest.raises(ValueError, match="invalid|Error"):
                Calibration.from_state(state | change)
            rates = state["measured"]
            for part in (rates | {"gallery_size": "x"}, rates | {"far": rates["far"] | {"num_trials": "x"}}):
                with pytest.raises(ValueError, match="measured"):
                    Calibration.from_state(state | {"measured": part})
            del state["far"]
            with pytest.raises(ValueError, match="far"):
                Calibration.from_state(state)


def test_invalid_rates_and_too_few_identities_are_rejected(subtests):
    cases = [
        ({"far": 0}, ConfigError, "far"),
        ({"fpir": 1}, ConfigError, "fpir"),
        ({"fraction": 1.5}, ConfigError, "fraction"),
        ({"far": float("nan")}, ConfigError, "far"),
        ({"method": "beta"}, ConfigError, "isotonic"),
        ({"metric": "manhattan"}, ConfigError, "manhattan"),
        ({"far": 1e-4}, DataError, "30,000 pairs of identities"),
        ({"frr": 0.01}, DataError, "300 identities"),
        ({"fpir": 0.02}, DataError, "150 identities"),
        ({"fraction": 0.995}, DataError, "remain"),
        ({"gallery_size": 1000}, ConfigError, "236"),
    ]
    for options, error, found in cases:
        with subtests.test(options=options, error=error, found=found), pytest.raises(error, match=found):
            calibrated(**options)


def test_features_that_cannot_be_calibrated_are_rejected():
    features, identities = look_alikes(120, 4, seed=0)
    bad = features.clone()
    bad[::7] = float("nan")
    with pytest.raises(DataError, match=r"\b37 of 240\b"):
        calibrate(bad, identities, metric="cosine", **RATES)
    one_each = identities_of(480, 1)
    with pytest.raises(DataError, match="genuine"):
        calibrate(features, one_each, metric="cosine", **RATES)
