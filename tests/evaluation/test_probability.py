"""Tests of the probability of the same identity: scikit-learn, naive pooling, priors and degenerate scores."""

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from fastamp.evaluation.probability import fit_probability
from fastamp.utils.choices import PROBABILITY_METHODS


def scores(seed=0, count=3000):
    random = np.random.default_rng(seed)
    return random.normal(0.5, 0.15, count), random.normal(0.1, 0.15, 10 * count)


def weighted(genuine, impostor):
    """Return scores, labels and weights of both classes with the same total weight."""
    x, y = np.concatenate((genuine, impostor)), np.repeat([1, 0], [len(genuine), len(impostor)])
    return x, y, np.where(y == 1, 1 / len(genuine), 1 / len(impostor))


def test_isotonic_probability_equals_scikit_learn():
    genuine, impostor = scores()
    curve = fit_probability(genuine, impostor, method="isotonic", num_identities=10**6)
    x, y, weights = weighted(genuine, impostor)
    reference = IsotonicRegression(out_of_bounds="clip").fit(x, y, sample_weight=weights)
    points = np.linspace(0.05, 0.6, 50)
    assert curve.at(points) == pytest.approx(reference.predict(points), abs=0.02)  # scores are counted in bins
    assert (np.diff(curve.probabilities) >= 0).all() and len(curve.scores) < 400


def test_logistic_probability_equals_scikit_learn():
    genuine, impostor = scores()
    curve = fit_probability(genuine, impostor, method="logistic", num_identities=10**6)
    x, y, weights = weighted(genuine, impostor)
    reference = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(x[:, None], y, sample_weight=weights * len(x))
    points = np.linspace(-0.2, 0.8, 50)
    assert curve.at(points) == pytest.approx(reference.predict_proba(points[:, None])[:, 1], abs=2e-3)


def test_isotonic_fit_pools_adjacent_violators():
    # Impostors at 1 and 3, genuine at 2 and 4: the pairs at 2 and 3 are pooled to 1/2.
    genuine, impostor = np.repeat([2.0, 4.0], 50), np.repeat([1.0, 3.0], 50)
    curve = fit_probability(genuine, impostor, method="isotonic", num_identities=1000)
    assert curve.at(np.array([2.0, 2.5, 3.0])) == pytest.approx([0.5] * 3, abs=1e-3)
    assert curve.at(0.0) == curve.at(1.0) < 0.01 and curve.at(9.0) == curve.at(4.0) > 0.99


@pytest.mark.parametrize("method", PROBABILITY_METHODS)
def test_prior_shifts_the_odds_and_probabilities_stay_inside_0_and_1(method):
    genuine, impostor = np.full(40, 0.9), np.full(400, 0.1)  # separable
    curve = fit_probability(genuine, impostor, method=method, num_identities=20)
    low, high = curve.at(np.array([-1.0, 1.0]))
    assert 0 < low < 0.1 and 0.9 < high < 1
    odds = high / (1 - high)
    assert curve.at(1.0, prior=0.01) == pytest.approx(odds / 99 / (1 + odds / 99))
    equal = fit_probability(np.zeros(5), np.zeros(9), method=method, num_identities=20)
    assert equal.at(0.0) == pytest.approx(0.5, abs=0.05)


def test_logistic_fit_never_decreases():
    genuine, impostor = scores()
    curve = fit_probability(impostor, genuine, method="logistic", num_identities=100)  # genuine pairs are less similar
    assert (np.diff(curve.probabilities) >= 0).all()
    assert np.ptp(curve.probabilities) < 0.05
