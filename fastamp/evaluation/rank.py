"""Rank the gallery for each query, exactly and in bounded memory: AP, INP and CMC.

Distances come in blocks of queries (``DistanceBlocks``). The rank of a match is the number of gallery images before it,
which is counted, or found among those that are no farther than the last match: the whole gallery is not sorted.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from fastamp.evaluation.matches import JUNK_PID, Identities, Matches, Pairs, check_sets
from fastamp.layers.distance import FeatureDistances
from fastamp.utils.errors import DataError

# What ranking takes, in ns: sorting a row, for each element; comparing it with a match, for the call and each element
# (one core of an AMD EPYC, NumPy 2.4, 16,000 and 82,000 float32: 250 and 1,800 us a sort, 4 and 9 us a comparison).
_SORT, _COMPARE_CALL, _COMPARE = 18.0, 3500.0, 0.07
# Taking out what is no farther than a match pays where it is less than one in so many of the gallery.
_CLOSE_SHARE = 8


@dataclass(frozen=True)
class RankingResult:
    """Per-query results of a ranking, in query order.

    Attributes:
        ap: (Q,) float64, average precision in 0..1; 0 where not ``valid``.
        inp: (Q,) float64, inverse negative penalty in 0..1: the number of matches over the rank of the last one
            (Ye et al. 2021, arXiv:2001.04193, eq. 8); 0 where not ``valid``.
        first_match: (Q, R) int64, rank of the first match from 0, junk left out, in each of R draws of the gallery (one
            where nothing is drawn); -1 where the query has no match, or is no query in that draw.
    """

    ap: torch.Tensor
    inp: torch.Tensor
    first_match: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """(Q,) bool, whether the query has a match; the others take no part in the means."""
        return (self.first_match >= 0).any(1)

    @property
    def num_valid(self) -> int:
        """The number of queries that have a match."""
        return int(self.valid.sum())

    @property
    def trials(self) -> torch.Tensor:
        """(Q,) float64, in how many draws each query was ranked: its weight in the means."""
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
        """Return (Q,) float64: in which share of a query's draws a match is among the first ``rank`` (from 1)."""
        hit = (self.first_match >= 0) & (self.first_match < rank)
        return hit.double().sum(1) / self.trials.clamp_min(1)

    def cmc(self, rank: int) -> float:
        """Return the share of the valid queries that have a match among their first ``rank`` (from 1) images."""
        return self._mean(self.hits(rank))

    def _mean(self, values: torch.Tensor) -> float:
        return ((values * self.trials).sum() / self.trials.sum()).item()


class Ranker:
    """Takes blocks of distances one by one, in any order, and returns the ranking of their queries.

    Args:
        ids: of Q queries and G gallery images.
        cross_camera: gallery images of the query's identity from the query's own camera are junk.
        trapezoid: the AP of the first Market-1501 evaluation code: the area under the precision-recall curve by the
            trapezoidal rule, gallery images of identity -1 left out. Without, the mean of the precisions at the
            matches, as everybody reports it today.

    Attributes:
        draws: of the gallery, R.
    """

    draws = 1

    def __init__(self, ids: Identities, *, cross_camera: bool = True, trapezoid: bool = False) -> None:
        unmatched = JUNK_PID if trapezoid else None
        self.matches = Matches(ids, cross_camera=cross_camera, unmatched_pid=unmatched)
        self.trapezoid = trapezoid
        self._left_out = (ids.gallery_pids == JUNK_PID).nonzero().flatten() if trapezoid else None
        self._parts: dict[int, tuple[np.ndarray, ...]] = {}

    def add(self, start: int, block: torch.Tensor) -> None:
        """Rank the queries from ``start`` on by a (B, G) block of distances; the junk's are overwritten."""
        for first, last in self.matches.spans(start, start + len(block)):
            self._parts[first] = self._judge(first, block[first - start : last - start])

    def result(self) -> RankingResult:
        """Return the results of the queries seen, on the CPU, in their order."""
        none = np.empty(0), np.empty(0), np.empty((0, self.draws), dtype=np.int64)
        parts = [none, *(self._parts[start] for start in sorted(self._parts))]
        return RankingResult(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))

    def _leave_out_junk(self, block: torch.Tensor, pairs: Pairs) -> None:
        # NaN is neither closer nor farther than anything.
        rows, columns = (torch.from_numpy(side).to(block.device) for side in (pairs.junk_rows, pairs.junk_columns))
        block[rows, columns] = torch.nan
        if self._left_out is not None:
            block[:, self._left_out.to(block.device)] = torch.nan

    def _judge(self, start: int, block: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Return the AP, INP and first match of the block's queries."""
        pairs = self.matches.of(start, start + len(block))
        self._leave_out_junk(block, pairs)
        return self._judge_pairs(start, block, pairs)

    def _judge_pairs(self, start: int, block: torch.Tensor, pairs: Pairs) -> tuple[np.ndarray, ...]:
        ranks = ranks_of(block, pairs)
        ranks = ranks[np.lexsort((ranks, pairs.rows))]
        counts = np.bincount(pairs.rows, minlength=len(block))
        ends = np.cumsum(counts)
        found = np.arange(len(ranks)) - np.repeat(ends - counts, counts)  # matches before each
        precision = (found + 1) / (ranks + 1)
        if self.trapezoid:
            before = np.divide(found, ranks, out=np.ones(len(ranks)), where=ranks > 0)
            precision = (before + precision) / 2
        ap = np.bincount(pairs.rows, weights=precision, minlength=len(block)) / counts.clip(1)
        inp, first = np.zeros(len(block)), np.full((len(block), 1), -1)
        valid = counts > 0
        inp[valid] = counts[valid] / (ranks[ends[valid] - 1] + 1)
        first[valid, 0] = ranks[(ends - counts)[valid]]
        return ap, inp, first


def ranks_of(block: torch.Tensor, pairs: Pairs) -> np.ndarray:
    """Return the rank from 0 of each match in a stable sort of its row, entries that are NaN left out.

    Args:
        block: (B, G) float distances.
        pairs: the matches.

    Returns:
        As many int64 as there are matches, in their order.
    """
    return _ranks_by_rows(block, pairs) if block.device.type == "cpu" else _ranks_by_pairs(block, pairs)


def _ranks_by_rows(block: torch.Tensor, pairs: Pairs) -> np.ndarray:
    """Count row by row: a row stays in the cache, where NumPy compares it (threads gain nothing: steps of a few us)."""
    distances = block.numpy()
    bounds = np.searchsorted(pairs.rows, np.arange(len(distances) + 1))
    ranks = np.empty(len(pairs.rows), dtype=np.int64)
    flags = np.empty(distances.shape[1], dtype=bool)
    for row, (first, last) in zip(distances, itertools.pairwise(bounds), strict=True):
        if last > first:
            ranks[first:last] = _ranks_in_row(row, pairs.columns[first:last], flags)
    return ranks


def _ranks_in_row(row: np.ndarray, columns: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return the ranks of ``columns`` in one row; ``flags`` is scratch memory of its size."""
    own = row[columns]
    ranks, order = np.empty(len(columns), dtype=np.int64), own.argsort()
    left = len(order)
    while left and _counting_pays(left, len(row)):
        left -= 1
        farthest = order[left]
        ranks[farthest] = _count(row, columns[farthest], flags)
        if ranks[farthest] * _CLOSE_SHARE < len(row):
            break
    if left:
        # Whatever is farther than the last of the rest is of no consequence, and what is left keeps its order.
        rest = order[:left]
        kept = np.less_equal(row, own[rest[-1]], out=flags).nonzero()[0]
        ranks[rest] = _ranks_among(row[kept], own[rest], kept.searchsorted(columns[rest]), flags[: len(kept)])
    return ranks


def _ranks_among(row: np.ndarray, own: np.ndarray, columns: np.ndarray, flags: np.ndarray) -> np.ndarray:
    if _counting_pays(len(columns), len(row)):
        return np.array([_count(row, column, flags) for column in columns], dtype=np.int64)
    ordered = np.sort(row)
    ranks = ordered.searchsorted(own)
    tied = ordered.searchsorted(own, side="right") - ranks > 1
    if tied.any():
        ranks[tied] = [_count(row, column, flags) for column in columns[tied]]
    return ranks


def _counting_pays(matches: int, size: int) -> bool:
    return matches * (_COMPARE_CALL + size * _COMPARE) < size * _SORT


def _count(row: np.ndarray, column: int, flags: np.ndarray) -> int:
    """Return the place of ``column`` in a stable sort: before it the not farther count, after it the closer."""
    own = row[column]
    before, after = flags[:column], flags[column:]
    np.less_equal(row[:column], own, out=before)
    np.less(row[column:], own, out=after)
    return np.count_nonzero(flags)


def _ranks_by_pairs(block: torch.Tensor, pairs: Pairs) -> np.ndarray:
    """Count by tensor operations over a few hundred matches at once, in as much memory as the block has."""
    rows, columns = (torch.from_numpy(side).to(block.device) for side in (pairs.rows, pairs.columns))
    everyone = torch.arange(block.shape[1], device=block.device)
    ranks = []
    size = max(1, len(block) // 2)
    for some_rows, some_columns in zip(rows.split(size), columns.split(size), strict=True):
        own = block[some_rows, some_columns][:, None]
        others = block[some_rows]
        before = (others < own) | ((others == own) & (everyone < some_columns[:, None]))
        ranks.append(before.sum(1))
    return torch.cat(ranks).cpu().numpy() if ranks else np.empty(0, dtype=np.int64)


def rank_distances(distances: torch.Tensor, ids: Identities, *, trapezoid: bool = False) -> RankingResult:
    """Rank the gallery for each query by distance and judge it under the Market-1501 rule.

    Gallery images of the query's identity from the query's own camera are junk and left out (Zheng et al. 2015).
    Equal distances keep the gallery's order, so that the result does not depend on a sort.

    Args:
        distances: (Q, G) numbers.
        ids: of Q queries and G gallery images.
        trapezoid: see ``Ranker``.

    Returns:
        Per-query results on the CPU.

    Raises:
        DataError: the shapes do not fit, or a distance is NaN.
    """
    if distances.shape != (len(ids.query_pids), len(ids.gallery_pids)):
        raise DataError(
            f"distances are {tuple(distances.shape)}, for {len(ids.query_pids)} queries and {len(ids.gallery_pids)} "
            "gallery images"
        )
    if distances.isnan().any():
        raise DataError(f"{int(distances.isnan().sum())} of {distances.numel()} distances are NaN")
    ranker = Ranker(ids, trapezoid=trapezoid)
    exact = distances.dtype if distances.dtype in (torch.float32, torch.float64) else torch.float64
    ranker.add(0, distances.to(exact, copy=True))
    return ranker.result()


def rank_features(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    ids: Identities,
    *,
    metric: str = "cosine",
    memory_budget_mb: float = 256,
) -> RankingResult:
    """Rank the gallery for each query by the distance of their features, a block of queries at a time.

    Args:
        query_features: (Q, D) float, any precision.
        gallery_features: (G, D) float, on the same device.
        ids: of the Q and G images.
        metric: ``"cosine"`` or ``"euclidean"``; distances are float32 (float64 for float64 features).
        memory_budget_mb: MiB of distances held at once.

    Raises:
        ConfigError: unknown metric.
        DataError: query or gallery is empty, shapes do not fit, or a feature is not finite.
    """
    check_sets(query_features, gallery_features, ids)
    distances = FeatureDistances(query_features, gallery_features, metric=metric, memory_budget_mb=memory_budget_mb)
    ranker = Ranker(ids)
    for start, block in distances.blocks():
        ranker.add(start, block)
    return ranker.result()
