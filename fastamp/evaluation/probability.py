"""Calibration of similarity scores to the probability that two images show the same identity."""

from dataclasses import dataclass

import numpy as np

# Scores are counted in bins, so that the fit does not depend on the number of pairs.
_BINS = 4096
# Points of the curve of a logistic fit; interpolation between them is exact to 1e-4.
_POINTS = 257


@dataclass(frozen=True)
class ProbabilityCurve:
    """Monotone, piecewise linear map of a similarity to a probability, constant beyond its ends.

    Attributes:
        scores: (K,) float64, ascending similarities.
        probabilities: (K,) float64 in (0, 1), non-decreasing, for a prior of 0.5: as many genuine as impostor pairs.
    """

    scores: np.ndarray
    probabilities: np.ndarray

    def at(self, score: np.ndarray | float, *, prior: float = 0.5) -> np.ndarray:
        """Compute the probability of the same identity for similarities of any shape.

        Args:
            score: similarities.
            prior: fraction in (0, 1) of compared pairs that show the same identity. Default: 0.5.
        """
        probability = np.interp(score, self.scores, self.probabilities)
        odds = probability / (1 - probability) * prior / (1 - prior)
        return np.asarray(odds / (1 + odds))


def fit_probability(genuine: np.ndarray, impostor: np.ndarray, *, method: str, num_identities: int) -> ProbabilityCurve:
    """Fit the probability of the same identity for a given similarity, at a prior of 0.5.

    Both classes have the same total weight, whatever their numbers of pairs. An impostor pair above all scores, with
    the weight of one pair of identities, and a genuine pair below all scores, with the weight of one identity, keep the
    probabilities of finite evidence away from 0 and 1.

    Args:
        genuine, impostor: (G,) and (I,) finite similarities of pairs of the same and of different identities.
        method: ``"isotonic"``: non-decreasing fit by pool-adjacent-violators (Zadrozny and Elkan 2002);
            ``"logistic"``: logistic regression on the score (Platt 1999).
        num_identities: number of identities in the pairs.

    Returns:
        The curve.
    """
    from scipy import optimize, special  # slow to import

    low, high = min(genuine.min(), impostor.min()), max(genuine.max(), impostor.max())
    if high <= low:
        high = low + max(abs(low), 1.0) * 1e-6
    edges = np.linspace(low, high, _BINS + 1)
    counts = [np.histogram(scores, edges)[0] / len(scores) for scores in (genuine, impostor)]
    counts[0][0] += 1 / (num_identities + 1)
    counts[1][-1] += 2 / (num_identities * (num_identities - 1) + 2)
    used = counts[0] + counts[1] > 0
    x = ((edges[1:] + edges[:-1]) / 2)[used]
    same, different = (histogram[used] / histogram.sum() for histogram in counts)
    if method == "logistic":
        points = np.linspace(low, high, _POINTS)
        probabilities = special.expit(_logistic(x, same, different)(points))
        return ProbabilityCurve(points, np.clip(probabilities, 1e-9, 1 - 1e-9))
    fit = optimize.isotonic_regression(same / (same + different), weights=same + different)
    # The ends of each block; equal probabilities in between are redundant.
    starts, ends = fit.blocks[:-1], fit.blocks[1:] - 1
    kept = np.unique(np.concatenate((starts, ends)))
    return ProbabilityCurve(x[kept], np.clip(fit.x[kept], 1e-9, 1 - 1e-9))


def _logistic(x: np.ndarray, same: np.ndarray, different: np.ndarray):  # type: ignore[no-untyped-def]
    """Fit the logit of the probability as a linear, increasing function of the score; see ``fit_probability``."""
    from scipy import optimize, special

    center, scale = x.mean(), max(x.std(), 1e-12)
    z = (x - center) / scale

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logit = np.exp(parameters[0]) * z + parameters[1]
        value = (same * np.logaddexp(0, -logit) + different * np.logaddexp(0, logit)).sum()
        slope = different * special.expit(logit) - same * special.expit(-logit)
        return value, np.array([(slope * z).sum() * np.exp(parameters[0]), slope.sum()])

    solution = optimize.minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(-20, 20), (-1e4, 1e4)])
    gain, offset = np.exp(solution.x[0]), solution.x[1]
    return lambda scores: gain * (scores - center) / scale + offset
