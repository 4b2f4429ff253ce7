"""Ranks of the matches, and the AP, INP and CMC of each query.

The rank of a match is the number of gallery images before it. Instead of sorting the entire gallery, the images before
a match are counted, or only the images up to the last match are sorted.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

# Time in ns per element of sorting a row, per call of a comparison with one match, and per compared element (one core
# of an AMD EPYC, NumPy 2.4, rows of 16,000 and 82,000 float32: 250 and 1,800 us per sort, 4 and 9 us per comparison).
_SORT, _COMPARE_CALL, _COMPARE = 18.0, 3500.0, 0.07
# Selecting the images up to a match is faster if they are less than 1 / _CLOSE_FRACTION of the gallery.
_CLOSE_FRACTION = 8
MISS = int(np.iinfo(np.int64).max)
"""Rank of the first match of a query that has none, under a rule that counts it as a miss instead of excluding it."""


@dataclass(frozen=True)
class RankingResult:
    """Per-query results of a ranking, in query order.

    Attributes:
        ap: (Q,) float64, average precision in 0..1; 0 for queries that are not ``valid``.
        inp: (Q,) float64, inverse negative penalty in 0..1: number of matches divided by the rank of the last match
            (Ye et al. 2021, arXiv:2001.04193, eq. 8); 0 for queries that are not ``valid``.
        first_match: (Q, R) int64, 0-based rank of the first match, not counting junk, in each of R random galleries;
            R is 1 for a fixed gallery. -1 if the query has no match or is itself in the gallery of that trial; ``MISS``
            if a query without a match counts as wrong.
        extra: (Q, E) float64, further results that the ranker of a rule records, see ``RankingRule.further_metrics``.
            None (default) if there are none.
    """

    ap: torch.Tensor
    inp: torch.Tensor
    first_match: torch.Tensor
    extra: torch.Tensor | None = None

    @property
    def valid(self) -> torch.Tensor:
        """(Q,) bool, True for queries with a match; only these contribute to the means."""
        return (self.first_match >= 0).any(1)

    @property
    def num_valid(self) -> int:
        """Number of queries with a match."""
        return int(self.valid.sum())

    @property
    def trials(self) -> torch.Tensor:
        """(Q,) float64, number of trials in which each query was ranked: the weight of the query in the means."""
        return (self.first_match >= 0).double().sum(1)

    @property
    def mean_ap(self) -> float:
        """mAP in 0..1."""
        return self._mean(self.ap)

    @property
    def mean_inp(self) -> float:
        """mINP in 0..1."""
        return self._mean(self.inp)

    def hits(self, rank: int) -> torch.Tensor:
        """Compute the fraction of each query's trials with a match within the 1-based ``rank``: (Q,) float64."""
        hit = (self.first_match >= 0) & (self.first_match < rank)
        return hit.double().sum(1) / self.trials.clamp_min(1)

    def cmc(self, rank: int) -> float:
        """Compute the CMC at 1-based ``rank``: fraction in 0..1 of valid queries with a match within that rank."""
        return self._mean(self.hits(rank))

    def worst_first(self) -> np.ndarray:
        """Return (Q,) int64, the queries in ascending order of AP, and those without a match last."""
        return np.lexsort((self.ap.numpy(), ~self.valid.numpy()))

    def select(self, queries: torch.Tensor) -> "RankingResult":
        """Return the results of some queries, given their indices or a mask."""
        extra = None if self.extra is None else self.extra[queries]
        return RankingResult(self.ap[queries], self.inp[queries], self.first_match[queries], extra)

    def _mean(self, values: torch.Tensor) -> float:
        return ((values * self.trials).sum() / self.trials.sum()).item()


def query_scores(
    ranks: np.ndarray, rows: np.ndarray, num_queries: int, *, trapezoid: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute AP, INP and the rank of the first match of each query from the ranks of its matches.

    Args:
        ranks: (P,) int64, 0-based ranks of all matches.
        rows: (P,) int64, query index of each match, ascending.
        num_queries: number of queries, B.
        trapezoid: if True, compute trapezoidal AP, see ``RankingRule``. Default: False.

    Returns:
        ``(average precision, inverse negative penalty, rank of the first match)``: (B,) float64, (B,) float64 and (B,)
        int64; 0, 0 and -1 for a query without matches.
    """
    ranks = ranks[np.lexsort((ranks, rows))]
    counts = np.bincount(rows, minlength=num_queries)
    ends = np.cumsum(counts)
    matches_before = np.arange(len(ranks)) - np.repeat(ends - counts, counts)
    precision = (matches_before + 1) / (ranks + 1)
    if trapezoid:
        precision_before = np.divide(matches_before, ranks, out=np.ones(len(ranks)), where=ranks > 0)
        precision = (precision_before + precision) / 2
    ap = np.bincount(rows, weights=precision, minlength=num_queries) / counts.clip(1)
    inp, first_match = np.zeros(num_queries), np.full(num_queries, -1)
    valid = counts > 0
    inp[valid] = counts[valid] / (ranks[ends[valid] - 1] + 1)
    first_match[valid] = ranks[(ends - counts)[valid]]
    return ap, inp, first_match


def ranks_of_matches(distances: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Compute the rank of each match in a stable sort of its row.

    Args:
        distances: (B, G) float; NaN entries are excluded.
        rows: (P,) int64, query index of each match, ascending.
        columns: (P,) int64, gallery index of each match.

    Returns:
        (P,) int64, 0-based ranks.
    """
    if distances.device.type != "cpu":
        return _ranks_on_device(distances, rows, columns)
    # One row at a time, because a row fits into the cache. Threads do not help: each step takes only a few us.
    bounds = np.searchsorted(rows, np.arange(len(distances) + 1))
    ranks = np.empty(len(rows), dtype=np.int64)
    flags = np.empty(distances.shape[1], dtype=bool)
    for row, (first, last) in zip(distances.numpy(), itertools.pairwise(bounds), strict=True):
        if last > first:
            ranks[first:last] = _ranks_in_row(row, columns[first:last], flags)
    return ranks


def _ranks_in_row(row: np.ndarray, columns: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Compute the ranks of ``columns`` in one row of distances; ``flags`` is a (G,) bool buffer."""
    match_distances = row[columns]
    ranks, order = np.empty(len(columns), dtype=np.int64), match_distances.argsort()
    remaining = len(order)
    while remaining and _is_counting_faster(remaining, len(row)):
        remaining -= 1
        farthest = order[remaining]
        ranks[farthest] = _count_before(row, columns[farthest], flags)
        if ranks[farthest] * _CLOSE_FRACTION < len(row):
            break
    if remaining:
        # Images farther than the last remaining match do not affect the ranks; the others keep their order.
        remaining_order = order[:remaining]
        kept = np.less_equal(row, match_distances[remaining_order[-1]], out=flags).nonzero()[0]
        ranks[remaining_order] = _ranks_among(
            row[kept], match_distances[remaining_order], kept.searchsorted(columns[remaining_order]), flags[: len(kept)]
        )
    return ranks


def _ranks_among(row: np.ndarray, match_distances: np.ndarray, columns: np.ndarray, flags: np.ndarray) -> np.ndarray:
    if _is_counting_faster(len(columns), len(row)):
        return np.array([_count_before(row, column, flags) for column in columns], dtype=np.int64)
    ordered = np.sort(row)
    ranks = ordered.searchsorted(match_distances)
    tied = ordered.searchsorted(match_distances, side="right") - ranks > 1
    if tied.any():
        ranks[tied] = [_count_before(row, column, flags) for column in columns[tied]]
    return ranks


def _is_counting_faster(matches: int, size: int) -> bool:
    return matches * (_COMPARE_CALL + size * _COMPARE) < size * _SORT


def _count_before(row: np.ndarray, column: int, flags: np.ndarray) -> int:
    """Count the images before ``column`` in a stable sort, in which ties are ordered by column."""
    match_distance = row[column]
    before, after = flags[:column], flags[column:]
    np.less_equal(row[:column], match_distance, out=before)
    np.less(row[column:], match_distance, out=after)
    return int(np.count_nonzero(flags))


def _ranks_on_device(distances: torch.Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Compute ranks by tensor operations on chunks of matches; a chunk needs about as much memory as the distances."""
    on_device = [torch.from_numpy(side).to(distances.device) for side in (rows, columns)]
    gallery = torch.arange(distances.shape[1], device=distances.device)
    ranks = []
    size = max(1, len(distances) // 2)
    for chunk_rows, chunk_columns in zip(*(side.split(size) for side in on_device), strict=True):
        match_distances = distances[chunk_rows, chunk_columns][:, None]
        row_distances = distances[chunk_rows]
        before = (row_distances < match_distances) | (
            (row_distances == match_distances) & (gallery < chunk_columns[:, None])
        )
        ranks.append(before.sum(1))
    return torch.cat(ranks).cpu().numpy() if ranks else np.empty(0, dtype=np.int64)
