"""Ranker, from which those of further protocols are derived, and ranking by precomputed distances."""

import numpy as np
import torch

from fastamp.evaluation.identities import JUNK_PID, SAME_CAMERA, Identities, Junk, Matches, Pairs
from fastamp.evaluation.rank import RankingResult, query_scores, ranks_of_matches
from fastamp.utils.errors import DataError


class Ranker:
    """Rank the gallery for each query, from blocks of distances that may be added in any order.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        junk: junk rule; None for no junk. Default: ``SAME_CAMERA``, the rule of Market-1501.
        trapezoid: if True, compute AP as in the original Market-1501 evaluation code: the area under the
            precision-recall curve by the trapezoidal rule, without gallery images of identity -1. Default: False, the
            mean precision at the matches.
        excluded: see ``Matches``. Default: none.

    Attributes:
        num_trials: number of random galleries, R.
        num_gallery: number of gallery images; in one trial, if the gallery is drawn at random.
        num_extra: number of columns of ``RankingResult.extra``, which ``rank`` then returns last. Default: 0.
    """

    num_trials = 1
    num_extra = 0

    def __init__(
        self,
        identities: Identities,
        *,
        junk: Junk | None = SAME_CAMERA,
        trapezoid: bool = False,
        excluded: np.ndarray | None = None,
    ) -> None:
        unmatched = JUNK_PID if trapezoid else None
        self.matches = Matches(identities, junk=junk, unmatched_pid=unmatched, excluded=excluded)
        self.trapezoid = trapezoid
        self.num_gallery = len(self.matches.gallery_pids)
        self._parts: dict[int, tuple[np.ndarray, ...]] = {}

    def add(self, start: int, distances: torch.Tensor) -> None:
        """Rank the gallery for queries ``start:start + B``, given (B, G) distances; those of junk become NaN."""
        for first, last in self.matches.spans(start, start + len(distances)):
            self._parts[first] = self.rank(first, distances[first - start : last - start])

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Return ``(AP, INP, rank of the first match)`` for queries ``start:start + B``: (B,), (B,) and (B, R)."""
        pairs = self.exclude_junk(start, distances)
        ranks = ranks_of_matches(distances, pairs.rows, pairs.columns)
        ap, inp, first_match = query_scores(ranks, pairs.rows, len(distances), trapezoid=self.trapezoid)
        return ap, inp, first_match[:, None]

    def exclude_junk(self, start: int, distances: torch.Tensor) -> Pairs:
        """Set the distances of junk to NaN for queries ``start:start + B``, and return the matches and junk."""
        pairs = self.matches.pairs(start, start + len(distances))
        # Comparisons with NaN are False, so NaN excludes an image from all counts.
        junk = (torch.from_numpy(side).to(distances.device) for side in (pairs.junk_rows, pairs.junk_columns))
        distances[tuple(junk)] = torch.nan
        if len(self.matches.unmatched):
            distances[:, torch.from_numpy(self.matches.unmatched).to(distances.device)] = torch.nan
        return pairs

    def result(self) -> RankingResult:
        """Return the results of all added queries on the CPU, in query order."""
        empty = [np.empty(0), np.empty(0), np.empty((0, self.num_trials), dtype=np.int64)]
        empty += [np.empty((0, self.num_extra))] if self.num_extra else []
        parts = [empty, *(self._parts[start] for start in sorted(self._parts))]
        return RankingResult(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))


def rank_distances(distances: torch.Tensor, identities: Identities, *, trapezoid: bool = False) -> RankingResult:
    """Rank the gallery for each query by precomputed distances, under the Market-1501 rule.

    Gallery images of the query's identity from the query's camera are junk, which is excluded (Zheng et al. 2015). Ties
    are broken by gallery order, so that the result is deterministic.

    Args:
        distances: (Q, G), any numeric dtype.
        identities: identities and cameras of the Q queries and G gallery images.
        trapezoid: if True, compute trapezoidal AP, see ``Ranker``. Default: False.

    Returns:
        Per-query results on the CPU.

    Raises:
        DataError: if the shapes do not match, or a distance is NaN.
    """
    num_query, num_gallery = len(identities.query_pids), len(identities.gallery_pids)
    if distances.shape != (num_query, num_gallery):
        raise DataError(
            f"shape mismatch: expected distances ({num_query}, {num_gallery}) for {num_query} queries and "
            f"{num_gallery} gallery images, got {tuple(distances.shape)}.\n"
            "  fix: pass one row for each query, and one column for each gallery image"
        )
    if distances.isnan().any():
        raise DataError(
            f"{int(distances.isnan().sum())} of {distances.numel()} distances are NaN.\n"
            "  fix: compute the distances from finite features"
        )
    ranker = Ranker(identities, junk=SAME_CAMERA, trapezoid=trapezoid)
    exact = distances.dtype if distances.dtype in (torch.float32, torch.float64) else torch.float64
    ranker.add(0, distances.to(exact, copy=True))
    return ranker.result()
