"""Mean and standard deviation of the results over the random splits of a test set."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def average_splits(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Average the metrics of several splits of one test set.

    Args:
        results: split -> metrics.

    Returns:
        Mean of each float that all splits have; ``baselines``: the same of each baseline; ``std``: metric -> sample
        standard deviation over the splits; and ``splits``: ``results``. Counts and confidence intervals are those of a
        single split, and only in ``splits``.
    """
    parts = list(results.values())
    values = _values(parts)
    metrics: dict[str, Any] = {name: statistics.fmean(found) for name, found in values.items()}
    baselines = parts[0].get("baselines", {})
    if baselines:
        means = {name: _values([part["baselines"][name] for part in parts]) for name in baselines}
        metrics["baselines"] = {
            name: {metric: statistics.fmean(found) for metric, found in scores.items()}
            for name, scores in means.items()
        }
    metrics["std"] = {name: statistics.stdev(found) for name, found in values.items()}
    return metrics | {"splits": dict(results)}


def average_runs(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the metrics of one test set of several runs, each on its own random split; see ``average_splits``.

    Args:
        results: metrics of each run; their ``splits``, the directions of its split, count as splits.
    """
    return average_splits(
        {
            f"run {number}: {title}": metrics
            for number, result in enumerate(results)
            for title, metrics in result.get("splits", {"": result}).items()
        }
    )


def _values(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the values of each float that all parts have."""
    return {
        name: [part[name] for part in parts]
        for name in parts[0]
        if all(isinstance(part.get(name), float) for part in parts)
    }
