"""Importance of the keys of a search: fraction of the score variance explained by each key."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from autotuner.search import Outcome
from autotuner.space import Parameter, Space

_FEWEST = 6
_BINS = 3


def importances(outcomes: Sequence[Outcome], space: Space) -> dict[str, float]:
    """Compute the importance (0..1) of each key, most important first; empty for fewer than six scores.

    The importance is epsilon squared (Kelley 1935): the fraction of the variance of the scores' ranks that is explained
    by groups of the key's values, corrected for chance. Each value of a choice is a group; values drawn from a range
    are divided into terciles. The importance of keys that only matter in combination is underestimated.

    In population based training, where values change during a trial, every evaluation counts, and its score is ranked
    among the scores of the same epoch.

    Args:
        outcomes: trials with a score.
        space: search space of the trials.
    """
    if any(outcome.parents for outcome in outcomes):
        by_epoch: dict[int, list[tuple[dict, float]]] = {}
        for outcome in outcomes:
            for (epoch, score), values in zip(outcome.history, outcome.history_values, strict=True):
                by_epoch.setdefault(epoch, []).append((values, score))
        rounds = list(by_epoch.values())
    else:
        rounds = [[(outcome.values, outcome.score) for outcome in outcomes if outcome.score is not None]]
    # Ranks in 0..1, so that rounds of different sizes are comparable.
    points = [
        (values, rank / len(pairs))
        for pairs in rounds
        for (values, _), rank in zip(pairs, rankdata([score for _, score in pairs]), strict=True)
    ]
    if len(points) < _FEWEST:
        return {}
    scores = np.array([score for _, score in points])
    explained = {
        key: _explained(scores, _groups([values[key] for values, _ in points], parameter))
        for key, parameter in space.parameters.items()
    }
    return dict(sorted(explained.items(), key=lambda item: -item[1]))


def _groups(values: Sequence[object], parameter: Parameter) -> list[object]:
    """Return the group of each value: for a choice, the value as text; for a range, the tercile among ``values``."""
    if parameter.kind == "choice":
        return [repr(value) for value in values]
    return [int((rank - 0.5) * _BINS / len(values)) for rank in rankdata(values)]


def _explained(scores: np.ndarray, groups: Sequence[object]) -> float:
    """Return epsilon squared of ``scores`` divided into ``groups``, clipped to at least 0."""
    members: dict[object, list[float]] = {}
    for score, group in zip(scores.tolist(), groups, strict=True):
        members.setdefault(group, []).append(score)
    within = sum(float(np.var(member)) * len(member) for member in members.values())
    total = float(np.var(scores)) * len(scores)
    free = len(scores) - len(members)
    if not total or free <= 0:
        return 0.0
    return max(0.0, 1 - within / free / (total / (len(scores) - 1)))
