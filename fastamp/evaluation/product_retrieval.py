"""Protocols of product retrieval: recall at k over all images of the test set, or from queries to a gallery.

Recall@k is the fraction of queries with an image of the same class among the k nearest (Song et al. 2016, "Deep metric
learning via lifted structured feature embedding"). There are no cameras.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastamp.evaluation.identities import SAME_IMAGE, Identities
from fastamp.evaluation.rank import MISS, RankingResult, query_scores, ranks_of_matches
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, NoCamera, Ranker, RankingRule


class FirstHitRanker(Ranker):
    """Ranker of FastRetri, which drops the nearest image of each query, instead of the query itself.

    If an image has a copy, the nearest image may be the copy; the query itself then counts as a match. A query without
    another image of its class is not excluded, but counts as a miss.

    Args:
        identities: identities of N images, which are both queries and gallery.
        rule: rule with the kind of AP; its junk is not used.
    """

    def __init__(self, identities: Identities, rule: RankingRule) -> None:
        super().__init__(identities, NoCamera(trapezoid=rule.trapezoid))
        self.num_gallery -= 1

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Rank the gallery without the nearest image, see ``Ranker.rank``."""
        pairs = self.exclude_junk(start, distances)
        ranks = ranks_of_matches(distances, pairs.rows, pairs.columns) - 1
        kept = ranks >= 0
        ap, inp, first_match = query_scores(ranks[kept], pairs.rows[kept], len(distances), trapezoid=self.trapezoid)
        return ap, inp, np.where(first_match < 0, MISS, first_match)[:, None]


class LeaveOneOut(RankingRule):
    """Rule under which each image is a query against all others: base class."""

    junk = SAME_IMAGE
    all_images = True


class RecallRule(RankingRule):
    """Rule whose CMC at rank k is also reported as ``Recall@k``: base class."""

    def metric_names(self, ranks: Sequence[int]) -> list[str]:
        """List the names of the metrics."""
        return super().metric_names(ranks) + [recall_name(rank) for rank in ranks]

    def metrics(self, ranking: RankingResult, ranks: Sequence[int], every: RankingResult) -> dict[str, Any]:
        """Compute the metrics, see ``RankingRule.metrics``."""
        metrics = super().metrics(ranking, ranks, every)
        return metrics | {recall_name(rank): metrics[f"Rank-{rank}"] for rank in ranks if metrics}


@PROTOCOL_REGISTRY.register("recall_at_k")
class RecallAtK(RecallRule, LeaveOneOut):
    """Recall at k, leave-one-out."""

    text = "recall at k, leave-one-out (each image is a query against all others)"


@PROTOCOL_REGISTRY.register("recall_at_k_first_hit")
class RecallAtKFirstHit(RecallRule, LeaveOneOut):
    """Recall at k of FastRetri, see ``FirstHitRanker``."""

    text = "recall at k, as in FastRetri (each image is a query, without the nearest image)"

    def ranker(self, identities: Identities, metric: str) -> Ranker:
        """Build the ranker."""
        return FirstHitRanker(identities, self)


@PROTOCOL_REGISTRY.register("recall_at_k_gallery")
class RecallAtKGallery(RecallRule):
    """Recall at k of queries in a gallery."""

    text = "recall at k of queries in a gallery (no junk)"


def recall_name(rank: int) -> str:
    """Return the metric name of the recall at k, e.g. ``Recall@10``."""
    return f"Recall@{rank}"
