"""Protocols of product retrieval: recall at k over all images of the test set, or from queries to a gallery.

Recall@k is the fraction of queries with an image of the same class among the k nearest (Song et al. 2016, "Deep metric
learning via lifted structured feature embedding"). There are no cameras.
"""

import numpy as np
import torch

from fastamp.evaluation.identities import IMAGE, Identities, Junk, Matches
from fastamp.evaluation.protocol import PROTOCOL_REGISTRY, Protocol, Ranker, RankingRule, build_ranker
from fastamp.evaluation.rank import MISS, query_scores, ranks_of_matches


def same_image(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return True for each pair of an image with itself; see ``Junk.test``."""
    same: np.ndarray = matches.query_columns[IMAGE][queries] == matches.gallery_columns[IMAGE][gallery]
    return same


SAME_IMAGE = Junk(same_image, uses_cameras=False)
"""The query itself, under rules in which each image is a query against all others."""


class FirstHitRanker(Ranker):
    """Ranker of FastRetri, which drops the nearest image of each query, instead of the query itself.

    If an image has a copy, the nearest image may be the copy; the query itself then counts as a match. A query without
    another image of its class is not excluded, but counts as a miss.

    Args:
        identities: identities of N images, which are both queries and gallery.
        trapezoid: see ``Ranker``.
    """

    def __init__(self, identities: Identities, *, trapezoid: bool = False) -> None:
        super().__init__(identities, junk=None, trapezoid=trapezoid)
        self.num_gallery -= 1

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Rank the gallery without the nearest image, see ``Ranker.rank``."""
        pairs = self.exclude_junk(start, distances)
        ranks = ranks_of_matches(distances, pairs.rows, pairs.columns) - 1
        kept = ranks >= 0
        ap, inp, first_match = query_scores(ranks[kept], pairs.rows[kept], len(distances), trapezoid=self.trapezoid)
        return ap, inp, np.where(first_match < 0, MISS, first_match)[:, None]


def _build_leave_one_out(identities: Identities, protocol: Protocol) -> Ranker:
    """Build a ranker of N images, each of which is a query against all others; see ``Identities.all_images``."""
    ranker = build_ranker(identities, protocol)
    ranker.num_gallery -= 1
    return ranker


PROTOCOL_REGISTRY.register("recall_at_k")(
    RankingRule(
        text="recall at k, leave-one-out (each image is a query against all others)",
        junk=SAME_IMAGE,
        build=_build_leave_one_out,
        all_images=True,
        recall=True,
    )
)
PROTOCOL_REGISTRY.register("recall_at_k_first_hit")(
    RankingRule(
        text="recall at k, as in FastRetri (each image is a query, without the nearest image)",
        junk=SAME_IMAGE,
        build=lambda identities, protocol: FirstHitRanker(identities, trapezoid=protocol.trapezoid),
        all_images=True,
        recall=True,
    )
)
PROTOCOL_REGISTRY.register("recall_at_k_gallery")(
    RankingRule(text="recall at k of queries in a gallery (no junk)", junk=None, recall=True)
)
