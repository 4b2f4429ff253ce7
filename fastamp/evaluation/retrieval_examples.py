"""Retrieval examples for reports: rank lists, ROC curve and mAP for each pair of cameras.

Memory and time are bounded: rank lists contain only a few queries, and statistics of large sets are computed over a
random sample of queries.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fastamp.evaluation.identities import Identities, Matches
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.ranking_rule import Ranker, RankingRule
from fastamp.evaluation.roc import RocCounter, RocCurve, sum_over_ranks
from fastamp.layers.distance import DistanceBlocks

# Queries processed at once, which requires a copy of their distances.
_BLOCK_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Selection and size of the retrieval examples.

    Attributes:
        kinds: kinds of rank lists: ``"best"`` and ``"worst"`` (by average precision), ``"random"``. Default: best,
            worst.
        lists: number of rank lists per kind. Default: 6.
        length: number of gallery images per rank list. Default: 10.
        pairs: maximum number of image pairs in the ROC curve and the camera matrix. Default: 2^26.
        cameras: maximum number of query cameras, and of gallery cameras, in the camera matrix; cameras with the most
            images are selected. Default: 16.
        seed: seed of the query sample and of the random lists. Default: 0.
    """

    kinds: tuple[str, ...] = ("best", "worst")
    lists: int = 6
    length: int = 10
    pairs: int = 2**26
    cameras: int = 16
    seed: int = 0


@dataclass(frozen=True)
class RankList:
    """Nearest gallery images of a query, excluding junk.

    Attributes:
        query: index of the query in the query set, or among all images if the protocol draws queries at random.
        gallery: (K,) int64, indices in the gallery, or among all images, nearest first.
        distances: (K,) float32.
        matches: (K,) bool, True for images of the query's identity.
        ap: average precision of the query in 0..1.
        first_match: 1-based rank of the first match; 0 for a query without a match, which the protocol counts as wrong.
    """

    query: int
    gallery: np.ndarray
    distances: np.ndarray
    matches: np.ndarray
    ap: float
    first_match: int


@dataclass(frozen=True)
class CameraMatrix:
    """mAP for each pair of a query camera and a gallery camera.

    Attributes:
        query_cameras, gallery_cameras: camera ids, ascending.
        mean_ap: (Q, G) float64 in 0..1; NaN if no query has a match.
        queries: (Q, G) int64, number of queries with a match.
        num_omitted: total number of query and gallery cameras that are not in the matrix.
    """

    query_cameras: list[int]
    gallery_cameras: list[int]
    mean_ap: np.ndarray
    queries: np.ndarray
    num_omitted: int


@dataclass(frozen=True)
class RetrievalExamples:
    """Retrieval examples of one test set.

    Attributes:
        lists: kind -> rank lists; empty on ranks other than 0.
        roc: ROC curve over the sampled queries, or over all queries with ``TEST.ROC``; None if there are no genuine or
            no impostor pairs.
        roc_uses_all_pairs: True if ``roc`` is computed over all queries.
        cameras: camera matrix over the sampled queries; None with fewer than two cameras.
        sampled: number of sampled queries.
        queries: number of all queries.
    """

    lists: dict[str, list[RankList]]
    roc: RocCurve | None
    roc_uses_all_pairs: bool
    cameras: CameraMatrix | None
    sampled: int
    queries: int


class ExampleCounter:
    """Accumulate the ROC curve and the camera matrix over sampled queries, from blocks of distances.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        rule: ranking rule.
        report_options: settings of the retrieval examples.
        limit: see ``RocCounter``; None to accumulate no ROC curve.
    """

    def __init__(
        self, identities: Identities, rule: RankingRule, report_options: ReportOptions, *, limit: float | None
    ) -> None:
        self.queries = len(identities.query_pids)
        count = min(self.queries, max(1, report_options.pairs // len(identities.gallery_pids)))
        self._sample = np.sort(np.random.default_rng(report_options.seed).permutation(self.queries)[:count])
        sampled = identities.select(self._sample, slice(None))
        self._roc = None if limit is None else RocCounter(sampled, limit=limit, junk=rule.junk)
        self._query_camids, gallery_camids = sampled.query_camids.numpy(), sampled.gallery_camids.numpy()
        self._query_cameras, omitted_query_cameras = _most_frequent(self._query_camids, report_options.cameras)
        self._gallery_cameras, omitted_gallery_cameras = _most_frequent(gallery_camids, report_options.cameras)
        self._num_omitted = omitted_query_cameras + omitted_gallery_cameras
        if rule.all_images or len({*self._query_cameras, *self._gallery_cameras}) < 2:
            self._gallery_cameras = []
        self._columns = [np.flatnonzero(gallery_camids == camera) for camera in self._gallery_cameras]
        self._rankers = [Ranker(sampled.select(slice(None), columns), rule) for columns in self._columns]
        self._first = len(self._sample)

    def add(self, start: int, distances: torch.Tensor) -> None:
        """Add the sampled queries in ``start:start + B``, given (B, G) distances, which are not modified."""
        if self._roc is None and not self._rankers:
            return
        first, last = np.searchsorted(self._sample, (start, start + len(distances))).tolist()
        self._first = min(self._first, first)
        for begin in range(first, last, _BLOCK_ROWS):
            rows = self._sample[begin : min(begin + _BLOCK_ROWS, last)] - start
            # Consecutive rows are a view and need no copy.
            is_contiguous = rows[-1] - rows[0] == len(rows) - 1
            part = distances[slice(rows[0], rows[-1] + 1) if is_contiguous else rows]
            if self._roc is not None:
                self._roc.add(begin, part)
            for ranker, columns in zip(self._rankers, self._columns, strict=True):
                ranker.add(begin, part[:, columns])

    def result(self, lists: dict[str, list[RankList]], roc: RocCurve | None) -> RetrievalExamples:
        """Combine the examples of all ranks.

        Args:
            lists: rank lists to include.
            roc: ROC curve over all pairs; None for the curve over the sampled queries.
        """
        uses_all_pairs = roc is not None
        if self._roc is not None:
            roc = self._roc.result()
        return RetrievalExamples(lists, roc, uses_all_pairs, self._camera_matrix(), len(self._sample), self.queries)

    def _camera_matrix(self) -> CameraMatrix | None:
        if not self._rankers:
            return None
        sums = torch.zeros(2, len(self._query_cameras), len(self._gallery_cameras), dtype=torch.float64)
        for column, ranker in enumerate(self._rankers):
            ranking = ranker.result()
            camids = self._query_camids[self._first : self._first + len(ranking.ap)]
            for row, camera in enumerate(self._query_cameras):
                chosen = torch.from_numpy(camids == camera) & ranking.valid
                sums[:, row, column] = torch.stack((ranking.ap[chosen].sum(), chosen.sum().double()))
        total, count = sum_over_ranks(sums).numpy()
        mean_ap = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        return CameraMatrix(
            self._query_cameras, self._gallery_cameras, mean_ap, count.astype(np.int64), self._num_omitted
        )


def rank_lists(
    ranking: RankingResult, blocks: DistanceBlocks, matches: Matches, rule: RankingRule, report_options: ReportOptions
) -> dict[str, list[RankList]]:
    """Build rank lists, recomputing the distances of the selected queries.

    The best and the worst queries each cover as many identities as possible, and no query is in both lists.

    Args:
        ranking: per-query results.
        blocks: distances of the queries to the gallery.
        matches: matches and junk of the queries.
        rule: rule of ``ranking``.
        report_options: kinds, number and length of the lists.

    Returns:
        Kind -> rank lists.
    """
    generator = np.random.default_rng(report_options.seed)
    shuffled = generator.permutation(np.flatnonzero(ranking.valid.numpy()))
    by_ap = shuffled[np.argsort(-ranking.ap.numpy()[shuffled], kind="stable")]
    best, worst = by_ap[: (len(by_ap) + 1) // 2], by_ap[: (len(by_ap) - 1) // 2 : -1]
    lists: dict[str, list[RankList]] = {}
    for kind in report_options.kinds:
        order = {"best": best, "worst": worst, "random": shuffled}[kind]
        queries = _select_diverse_queries(order, matches.query_pids, report_options.lists)
        lists[kind] = [_rank_list(query, ranking, blocks, matches, rule, report_options.length) for query in queries]
    return lists


def _select_diverse_queries(queries: np.ndarray, pids: np.ndarray, count: int) -> list[int]:
    """Select ``count`` queries in their given order, preferring the first query of each identity."""
    is_repeated = np.ones(len(queries), dtype=bool)
    is_repeated[np.unique(pids[queries], return_index=True)[1]] = False
    chosen: list[int] = queries[np.sort(np.argsort(is_repeated, kind="stable")[:count])].tolist()
    return chosen


def _rank_list(
    query: int, ranking: RankingResult, blocks: DistanceBlocks, matches: Matches, rule: RankingRule, length: int
) -> RankList:
    distances = blocks.row(query).cpu().numpy()
    pairs = matches.pairs(query, query + 1)
    excluded = np.zeros(len(distances), dtype=bool)
    excluded[pairs.junk_columns] = True
    if rule.all_images:  # the gallery contains the query itself
        excluded[query] = True
    excluded[matches.unmatched] = True
    order = np.argsort(np.where(excluded, np.inf, distances), kind="stable")[: int((~excluded).sum())]
    is_match = np.isin(order, pairs.columns)
    return RankList(
        query=query,
        gallery=order[:length],
        distances=distances[order[:length]].astype(np.float32),
        matches=is_match[:length],
        ap=float(ranking.ap[query]),
        first_match=1 + int(is_match.argmax()) if is_match.any() else 0,
    )


def _most_frequent(camids: np.ndarray, count: int) -> tuple[list[int], int]:
    """Return the ``count`` most frequent cameras, ascending, and the number of omitted cameras."""
    cameras, images = np.unique(camids, return_counts=True)
    kept = cameras[np.argsort(-images, kind="stable")[:count]]
    return sorted(kept.tolist()), len(cameras) - len(kept)
