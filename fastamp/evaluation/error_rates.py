"""Error rates of pairs of identities, with confidence intervals that respect that pairs share identities."""

import math
from dataclasses import dataclass

import numpy as np

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class ErrorRate:
    """Error rate with its 95 % confidence interval over identities.

    Attributes:
        rate: fraction in 0..1 of trials with an error.
        low, high: bounds of the interval, in 0..1.
        num_errors: number of trials with an error.
        num_trials: number of trials: image pairs or queries.
        num_identities: number of identities in the trials.
    """

    rate: float
    low: float
    high: float
    num_errors: int
    num_trials: int
    num_identities: int

    def __str__(self) -> str:
        return f"{100 * self.rate:.3g} % ({100 * self.low:.3g} to {100 * self.high:.3g} %)"


def pair_error_rate(errors: np.ndarray, trials: np.ndarray) -> ErrorRate:
    """Compute the error rate of trials that each involve two identities.

    Trials that share an identity are dependent: a person who resembles one other person resembles several. The variance
    therefore sums the covariances of all pairs of identities that have a member in common (dyadic-cluster-robust
    variance: Fafchamps and Gubert 2007; Aronow, Samii and Assenova 2015, arXiv:1312.3398). The interval is the
    exact binomial interval for the number of independent trials with this variance (Korn and Graubard 1998), which
    stays in 0..1 and is asymmetric for rare errors. Without errors, it is the interval for the disjoint pairs of
    identities, which are independent.

    A bootstrap that resamples identities counts the variation within each pair of identities three times: for n
    identities with weights w, the variance of w_i w_j is 3, not 1. At rates of 0.1 to 5 %, its intervals covered the
    true rate in 98 to 100 % of simulated sets, and these in 93 to 97 %.

    Args:
        errors: (n, n) errors of each pair of identities; the entries (i, j) and (j, i) are added, and the diagonal is
            ignored.
        trials: (n, n) number of trials, in the same form.

    Returns:
        The rate and its interval; 0 in 0..1 if there are no trials.
    """
    errors, trials = (_symmetric(counts) for counts in (errors, trials))
    present = trials.sum(1) > 0
    count, total, wrong = int(present.sum()), trials.sum() / 2, errors.sum() / 2
    residuals = (errors - wrong / (total or 1) * trials) / (total or 1)
    single = (residuals**2).sum() / 2
    variance = (residuals.sum(1) ** 2).sum() - single
    # The estimate may be negative for few identities; independent pairs are the least dependence.
    return _with_interval(wrong, total, count, variance=max(variance, single), independent=max(1, count // 2))


def identity_error_rate(errors: np.ndarray, trials: np.ndarray) -> ErrorRate:
    """Compute the error rate of trials that each involve one identity, e.g. genuine pairs.

    The identities are the independent units; otherwise as ``pair_error_rate``.

    Args:
        errors, trials: (n,) errors and trials of each identity.

    Returns:
        The rate and its interval; 0 in 0..1 if there are no trials.
    """
    errors, trials = errors.astype(np.float64), trials.astype(np.float64)
    count, total, wrong = int((trials > 0).sum()), trials.sum(), errors.sum()
    variance = (((errors - wrong / (total or 1) * trials) / (total or 1)) ** 2).sum()
    return _with_interval(wrong, total, count, variance=variance, independent=count)


def difference_interval(first: ErrorRate, second: ErrorRate) -> tuple[float, float]:
    """Compute the 95 % confidence interval of the difference of two rates from disjoint sets of identities.

    The interval combines the intervals of both rates (MOVER: Zou and Donner 2008, "Construction of confidence intervals
    about effect measures"). It contains 0 if the rates agree.
    """
    difference = first.rate - second.rate
    below = math.hypot(first.rate - first.low, second.high - second.rate)
    above = math.hypot(first.high - first.rate, second.rate - second.low)
    return difference - below, difference + above


def required_trials(rate: float) -> int:
    """Return the number of independent trials that a rate needs: 3 / rate (rule of three, ISO/IEC 19795-1).

    With this number, the probability that no error occurs is 5 %.
    """
    return math.ceil(3 / rate - 1e-9)


def required_identities(rate: float) -> int:
    """Return the number of identities whose pairs reach ``required_trials(rate)``."""
    return math.ceil((1 + math.sqrt(1 + 8 * required_trials(rate))) / 2 - 1e-9)


def _symmetric(counts: np.ndarray) -> np.ndarray:
    both: np.ndarray = counts.astype(np.float64) + counts.T
    np.fill_diagonal(both, 0)
    return both


def _with_interval(errors: float, trials: float, identities: int, *, variance: float, independent: int) -> ErrorRate:
    """Compute the rate, and its interval from its variance; ``independent`` trials are used if it is 0."""
    from scipy import special  # slow to import

    if not trials:
        return ErrorRate(0.0, 0.0, 1.0, 0, 0, 0)
    rate = errors / trials
    number, quantile = float(independent), (1 + _CONFIDENCE) / 2
    if variance > 0 and identities > 1:
        number = rate * (1 - rate) / variance
        # The variance has n - 1 degrees of freedom.
        number *= (special.ndtri(quantile) / special.stdtrit(identities - 1, quantile)) ** 2
        number = min(max(number, 1.0), trials)
    wrong = rate * number
    low = float(special.betaincinv(wrong, number - wrong + 1, 1 - quantile)) if wrong > 0 else 0.0
    high = float(special.betaincinv(wrong + 1, number - wrong, quantile)) if wrong < number else 1.0
    return ErrorRate(float(rate), low, high, round(errors), round(trials), identities)
