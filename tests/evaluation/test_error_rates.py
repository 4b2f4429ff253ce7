"""Tests of error rates and their intervals: naive loops, known intervals and coverage of the true rate."""

import itertools

import numpy as np
import pytest
from look_alikes import look_alikes
from scipy import stats

from fastamp.evaluation.error_rates import (
    ErrorRate,
    difference_interval,
    identity_error_rate,
    pair_error_rate,
    required_identities,
    required_trials,
)


def test_interval_of_pairs_uses_the_variance_over_pairs_with_a_common_identity():
    random = np.random.default_rng(0)
    count = 12
    trials = np.triu(random.integers(1, 5, (count, count)), 1)
    errors = np.minimum(np.triu(random.integers(0, 3, (count, count)), 1), trials)
    errors[0] = trials[0]  # an identity that resembles all others
    found = pair_error_rate(errors, trials)
    rate = errors.sum() / trials.sum()
    pairs = list(itertools.combinations(range(count), 2))
    variance = 0.0
    for (a, b), (c, d) in itertools.product(pairs, pairs):
        if {a, b} & {c, d}:
            variance += (errors[a, b] - rate * trials[a, b]) * (errors[c, d] - rate * trials[c, d])
    variance /= trials.sum() ** 2
    number = rate * (1 - rate) / variance * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, count - 1)) ** 2
    exact = stats.binomtest(1, 2).proportion_ci(method="exact")  # of a whole number of trials
    assert (exact.low, exact.high) == pytest.approx(stats.beta.ppf([0.025, 0.975], [1, 2], [2, 1]))
    bounds = stats.beta.ppf(
        [0.025, 0.975], [rate * number, rate * number + 1], [number * (1 - rate) + 1, number * (1 - rate)]
    )
    assert (found.rate, found.low, found.high) == pytest.approx((rate, *bounds), rel=1e-9)
    assert (found.num_errors, found.num_trials, found.num_identities) == (errors.sum(), trials.sum(), count)
    assert pair_error_rate(errors.T, trials) == pytest.approx(found)  # the order within a pair has no meaning


def test_interval_of_identities_equals_the_exact_interval_for_one_trial_each():
    errors = np.array([1] * 6 + [0] * 94)
    found = identity_error_rate(errors, np.ones(100))
    exact = stats.binomtest(6, 100).proportion_ci(method="exact")
    # The interval differs only by the t quantile instead of the normal one, which is 1.2 % wider.
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), rel=0.03)
    assert identity_error_rate(5 * errors, np.full(100, 5)).high == pytest.approx(found.high)  # copies add nothing


@pytest.mark.parametrize("rate", [0, 1])
def test_interval_without_variation_is_exact_for_disjoint_pairs(rate):
    trials = np.triu(np.full((20, 20), 9), 1)
    found = pair_error_rate(rate * trials, trials)
    exact = stats.binomtest(10 * rate, 10).proportion_ci(method="exact")
    assert (found.rate, found.low, found.high) == pytest.approx((rate, exact.low, exact.high))
    assert pair_error_rate(0 * trials, 0 * trials) == ErrorRate(0.0, 0.0, 1.0, 0, 0, 0)
    assert pair_error_rate(trials[:2, :2] * rate, trials[:2, :2]).num_identities == 2


def test_required_trials_follow_the_rule_of_three():
    assert [required_trials(rate) for rate in (0.001, 0.05, 0.3)] == [3000, 60, 10]
    for rate in (0.001, 0.013, 0.3):
        count = required_identities(rate)
        assert count * (count - 1) / 2 >= required_trials(rate) > (count - 1) * (count - 2) / 2


def test_difference_interval_contains_zero_for_equal_rates_only():
    first, second = (ErrorRate(rate, rate - 0.01, rate + 0.02, 1, 1, 1) for rate in (0.1, 0.2))
    low, high = difference_interval(first, first)
    assert low < 0 < high
    low, high = difference_interval(second, first)
    assert 0 < low < 0.1 < high
    assert (0.1 - low, high - 0.1) == pytest.approx((np.hypot(0.01, 0.02), np.hypot(0.02, 0.01)))


def accepted_pairs(seed, threshold, count=100, images=4):
    features, _ = look_alikes(count, images, seed)
    unit = features / features.norm(dim=1, keepdim=True)
    accepted = (unit @ unit.T >= threshold).numpy()
    by_pair = accepted.reshape(count, images, count, images).sum((1, 3))
    return np.triu(by_pair, 1), np.triu(np.full((count, count), images**2), 1)


def resampled(errors, trials, random, resamples=400):
    """Naive reference: percentile bootstrap that resamples identities."""
    weights = random.multinomial(len(errors), np.full(len(errors), 1 / len(errors)), size=resamples)
    rates = [w @ errors @ w / (w @ trials @ w) for w in weights]
    return np.quantile(rates, [0.025, 0.975])


@pytest.mark.integration
def test_intervals_cover_the_true_rate_but_those_of_independent_pairs_do_not():
    threshold = 0.55
    errors, trials = accepted_pairs(1000, threshold, count=2000, images=2)
    true = errors.sum() / trials.sum()
    assert 0.001 < true < 0.01
    covered = {"identities": 0, "independent pairs": 0, "bootstrap": 0}
    widths = {"identities": [], "bootstrap": []}
    random = np.random.default_rng(0)
    for seed in range(100):
        errors, trials = accepted_pairs(seed, threshold)
        found = pair_error_rate(errors, trials)
        covered["identities"] += found.low <= true <= found.high
        naive = stats.binomtest(int(errors.sum()), int(trials.sum())).proportion_ci(method="wilson")
        covered["independent pairs"] += naive.low <= true <= naive.high
        low, high = resampled(errors, trials, random)
        covered["bootstrap"] += low <= true <= high
        widths["identities"].append(found.high - found.low)
        widths["bootstrap"].append(high - low)
    assert covered["identities"] >= 91  # 5th percentile of a binomial with 0.95
    assert covered["independent pairs"] < 75
    # Resampling identities counts the variation within each pair of identities three times.
    assert np.mean(widths["bootstrap"]) > 1.15 * np.mean(widths["identities"]) and covered["bootstrap"] >= 97
