"""Metrics of a ranking: CMC, mAP, mINP, verification, confidence intervals and groups of queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastamp.evaluation.protocol import Protocol, accept_rate_name
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.ranking_rule import RankingRule
from fastamp.evaluation.retrieval_examples import RetrievalExamples
from fastamp.evaluation.roc import RocCurve

# Indices drawn at once over all bootstrap resamples, so that they fit into the CPU cache.
_RESAMPLED = 2**16
_INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class EvaluationResult:
    """Result of evaluating features under a protocol.

    Attributes:
        protocol: evaluation protocol.
        ranking: per-query results; per-image results under the VehicleID protocol.
        roc: ROC curve; None if verification is disabled, or there are no genuine or no impostor pairs.
        num_gallery: number of gallery images; if the gallery is drawn at random, the number in one trial.
        examples: retrieval examples for a report; None if they were not requested.
        num_indistinct: number of images whose features cannot be distinguished from those of another identity, see
            ``count_indistinct``. Default: 0.
        groups: (Q,) str, value of ``TEST.GROUP_BY`` for each query; None (default) for no groups.
    """

    protocol: Protocol
    ranking: RankingResult
    roc: RocCurve | None
    num_gallery: int
    examples: RetrievalExamples | None = None
    num_indistinct: int = 0
    groups: np.ndarray | None = None

    def metrics(self) -> dict[str, Any]:
        """Return a dict of all metrics.

        To add a metric in percent, compute it here and add its name to ``Protocol.metric_names``; those of a ranking
        rule are computed by its ``metrics``. The table in the log shows every float (``results_table``);
        ``fastamp.report.sections._tiles`` selects the metrics of a report.

        Returns:
            In percent, as float: ``Rank-r`` for each rank, ``mAP``, ``mINP``, ``metric`` (mean of mAP and Rank-1),
            further ones of ``RankingRule.metrics``, and, with verification, ``TAR@FAR=f``. As int: ``num_query``,
            ``num_gallery``, ``num_query_without_match`` and, if it is not 0, ``num_indistinct``. ``intervals``: ``mAP``
            and ``Rank-1`` -> [low, high] of the 95 % bootstrap confidence interval. With ``TEST.GROUP_BY``, ``groups``:
            see ``group_metrics``, and ``mean_over_groups``: metric -> mean over the groups that have a query with a
            match.
        """
        ranking = self.ranking
        metrics = summarize(ranking, self.protocol.rule, self.protocol.ranks, self.num_gallery)
        if self.roc is not None:
            for rate in self.protocol.false_accept_rates or ():
                metrics[accept_rate_name(rate)] = 100 * self.roc.tar_at(rate)
        if self.num_indistinct:
            metrics["num_indistinct"] = self.num_indistinct
        if self.protocol.resamples:
            metrics["intervals"] = self.intervals()
        if self.groups is not None:
            metrics["groups"] = groups = self.group_metrics()
            metrics["mean_over_groups"] = {
                name: float(np.mean([group[name] for group in groups.values() if name in group]))
                for name in float_names(groups)
            }
        return metrics

    def group_metrics(self) -> dict[str, dict[str, Any]]:
        """Compute the metrics of the queries with each value of ``TEST.GROUP_BY``.

        Returns:
            Value -> dict with the metrics in percent, for groups that have a query with a match, and the counts
            ``num_query`` and ``num_query_without_match``; numbers in ascending order, then texts.
        """
        groups = self.groups if self.groups is not None else np.empty(0, dtype=str)
        rule, metrics = self.protocol.rule, {}
        for value in sorted(np.unique(groups).tolist(), key=_number_before_text):
            ranking = self.ranking.select(torch.from_numpy(groups == value))
            metrics[value] = rule.metrics(ranking, self.protocol.ranks, self.ranking) | rule.counts(ranking)
        return metrics

    def intervals(self) -> dict[str, list[float]]:
        """Compute 95 % percentile bootstrap confidence intervals of mAP and Rank-1 over queries, in percent."""
        ranking = self.ranking.select(self.ranking.valid)
        weights = ranking.trials.numpy()
        sums = weights * np.stack((ranking.ap.numpy(), ranking.hits(1).numpy()))
        bounds = 100 * bootstrap_intervals(sums, weights, self.protocol.resamples, self.protocol.seed)
        return dict(zip(("mAP", "Rank-1"), bounds.tolist(), strict=True))


def bootstrap_intervals(sums: np.ndarray, weights: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Compute 95 % percentile bootstrap confidence intervals of ``sums.sum(1) / weights.sum()`` over N units.

    Args:
        sums: (C, N) float64.
        weights: (N,) float64, above 0.
        resamples: number of resamples.
        seed: seed of the resamples.

    Returns:
        (C, 2) float64, lower and upper bound of each row.
    """
    generator, count = np.random.default_rng(seed), len(weights)
    is_equal, means = bool((weights == weights[0]).all()), []
    for size in chunks(resamples, count):
        chosen = generator.integers(0, count, (size, count), dtype=np.int32)
        total = count * weights[0] if is_equal else weights[chosen].sum(1)
        means.append([row[chosen].sum(1) / total for row in sums])
    return np.asarray(np.quantile(np.concatenate(means, axis=1), _INTERVAL, axis=1).T)


def chunks(resamples: int, count: int) -> list[int]:
    """Split a number of resamples of ``count`` units into parts that fit into the CPU cache."""
    size = max(1, _RESAMPLED // count)
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def summarize(ranking: RankingResult, rule: RankingRule, ranks: Sequence[int], num_gallery: int) -> dict[str, Any]:
    """Return the metrics of a ranking, and the numbers of queries and gallery images; see ``EvaluationResult``."""
    metrics = rule.metrics(ranking, ranks, ranking) | rule.counts(ranking) | {"num_gallery": num_gallery}
    if "query" in rule.draws:  # counts of one trial
        draws = ranking.first_match.shape[1]
        metrics["num_query"], metrics["num_query_without_match"] = int(ranking.trials.sum()) // draws, 0
    return metrics


def float_names(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List the names of all floats in results of several sets or groups, in order of first appearance."""
    names = (name for result in results.values() for name, value in result.items() if isinstance(value, float))
    return list(dict.fromkeys(names))


def _number_before_text(value: str) -> tuple[bool, float, str]:
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
