"""From features to numbers: expansion, distances, re-ranking, ranking and verification, in one pass over blocks."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastamp.amp import force_fp32
from fastamp.evaluation.collapse import count_indistinct
from fastamp.evaluation.details import DetailCounter, Details, Wanted, rank_lists
from fastamp.evaluation.matches import Identities, check_sets
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.query_expansion import expand
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.rerank import ReRankedDistances
from fastamp.evaluation.roc import RocCounter, RocCurve, accept_rate_name, limit_of
from fastamp.layers.distance import DistanceBlocks, FeatureDistances
from fastamp.utils import comm
from fastamp.utils.errors import NoMatchError
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

# Queries drawn at once, of all resamples: they stay in the cache.
_RESAMPLED = 2**16
_INTERVAL = (0.025, 0.975)


@dataclass(frozen=True)
class Judgement:
    """What became of features under a protocol.

    Attributes:
        protocol: how they were judged.
        ranking: per query; under VehicleID's protocol per image.
        roc: None when verification was not asked for, or there were no genuine or no impostor pairs.
        num_gallery: gallery images, of one draw where they are drawn.
        details: what a report shows of it; None when nothing was wanted.
        num_indistinct: images whose feature no distance tells from another identity's; see ``count_indistinct``.
    """

    protocol: Protocol
    ranking: RankingResult
    roc: RocCurve | None
    num_gallery: int
    details: Details | None = None
    num_indistinct: int = 0

    def metrics(self) -> dict[str, Any]:
        """Return the numbers to report.

        Returns:
            ``Rank-r`` for each rank, ``mAP``, ``mINP``, ``metric`` (the mean of mAP and Rank-1) and, as asked for,
            ``TAR@FAR=f``, all in percent; the counts ``num_query``, ``num_gallery``,
            ``num_query_without_match`` and, only if there are some, ``num_indistinct``; and ``intervals``: ``mAP`` and
            ``Rank-1`` -> the low and high end of 95 %.
        """
        ranking = self.ranking
        metrics: dict[str, Any] = {f"Rank-{rank}": 100 * ranking.cmc(rank) for rank in self.protocol.ranks}
        metrics |= {"mAP": 100 * ranking.mean_ap, "mINP": 100 * ranking.mean_inp}
        metrics["metric"] = (metrics["mAP"] + metrics["Rank-1"]) / 2
        for rate in self.protocol.false_accept_rates if self.roc else ():
            metrics[accept_rate_name(rate)] = 100 * self.roc.tar_at(rate)
        metrics["num_query"], metrics["num_query_without_match"] = len(ranking.ap), len(ranking.ap) - ranking.num_valid
        metrics["num_gallery"] = self.num_gallery
        if self.protocol.draws_queries:  # those of one draw, which has no query without a match
            draws = ranking.first_match.shape[1]
            metrics["num_query"], metrics["num_query_without_match"] = int(ranking.trials.sum()) // draws, 0
        if self.num_indistinct:
            metrics["num_indistinct"] = self.num_indistinct
        if self.protocol.resamples:
            metrics["intervals"] = self.intervals()
        return metrics

    def intervals(self) -> dict[str, list[float]]:
        """Return the 95 % intervals of mAP and Rank-1 in percent, by the bootstrap over queries (percentiles)."""
        ranking = self.ranking
        weights = ranking.trials[ranking.valid].numpy()
        values = {"mAP": ranking.ap, "Rank-1": ranking.hits(1)}
        weighted = {name: each[ranking.valid].numpy() * weights for name, each in values.items()}
        generator = np.random.default_rng(self.protocol.seed)
        means: dict[str, list[np.ndarray]] = {name: [] for name in values}
        count, left = len(weights), self.protocol.resamples
        alike = bool((weights == weights[0]).all())
        while left:
            size = min(left, max(1, _RESAMPLED // count))
            chosen = generator.integers(0, count, (size, count), dtype=np.int32)
            total = count * weights[0] if alike else weights[chosen].sum(1)
            for name, each in weighted.items():
                means[name].append(each[chosen].sum(1) / total)
            left -= size
        return {
            name: [100 * float(bound) for bound in np.quantile(np.concatenate(parts), _INTERVAL)]
            for name, parts in means.items()
        }


@torch.no_grad()
@force_fp32
def judge_features(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    ids: Identities,
    protocol: Protocol | None = None,
    wanted: Wanted | None = None,
) -> Judgement:
    """Judge the features of queries and gallery; several ranks, which all hold all features, share the work.

    Args:
        query_features: (Q, D) float, any precision.
        gallery_features: (G, D) float, on the same device, on which all is computed.
        ids: of the Q and G images.
        protocol: None is Market-1501's by cosine distance.
        wanted: how much is to be shown; None is nothing.

    Returns:
        The same on every rank, but for the rank lists, which rank 0 alone has.

    Raises:
        ConfigError: query expansion whose weights overflow.
        DataError: the sets cannot be ranked (see ``check_sets``).
        NoMatchError: no query has a match.
    """
    protocol = protocol or Protocol()
    check_sets(query_features, gallery_features, ids, protocol.dtype(torch.float64))
    dtype = protocol.dtype(torch.promote_types(query_features.dtype, gallery_features.dtype))
    num_indistinct = count_indistinct(query_features, gallery_features, ids, metric=protocol.metric, dtype=dtype)
    if protocol.draws_queries:
        ids = ids.all_images()
        query_features = gallery_features = torch.cat((query_features, gallery_features))
    distances = _distances(query_features, gallery_features, protocol)
    ranker = protocol.ranker(ids)
    roc = counter = limit = None
    if protocol.false_accept_rates is not None or (wanted and not protocol.draws_queries):
        limit = comm.from_main_process(limit_of(distances))
    if protocol.false_accept_rates is not None:
        roc = RocCounter(ids, limit=limit, cross_camera=protocol.cross_camera)
    if wanted:
        counter = DetailCounter(ids, protocol, wanted, limit=limit if roc is None else None)
    start, stop = comm.own_share(len(query_features), distances.block_rows)
    blocks = track(distances.blocks(start, stop), -(-(stop - start) // distances.block_rows), "ranking")
    for first, block in blocks:
        if roc is not None:
            roc.add(first, block)  # before the ranker, which marks junk
        if counter is not None:
            counter.add(first, block)
        ranker.add(first, block)
    own = ranker.result()
    ranking = RankingResult(*(comm.gather_rows(column) for column in (own.ap, own.inp, own.first_match)))
    if ranking.num_valid == 0:
        raise NoMatchError(_explain_no_match(len(query_features), protocol))
    num_gallery = len(ranker.matches.groups.pids) if protocol.draws_queries else len(gallery_features)
    curve, details = _curve(roc, protocol), None
    if wanted:
        shown = comm.is_main_process()
        lists = rank_lists(ranking, distances, ranker.matches, protocol, wanted) if shown else {}
        details = counter.result(lists, curve)
    return Judgement(protocol, ranking, curve, num_gallery, details, num_indistinct)


def _curve(roc: RocCounter | None, protocol: Protocol) -> RocCurve | None:
    """Return the curve of all ranks' pairs, and say what it does not show."""
    if roc is None:
        return None
    if comm.is_distributed():
        roc.counts = comm.all_reduce_sum(roc.counts.to(comm.transport_device())).cpu()
    curve = roc.result()
    if curve is None:
        logger.warning("TEST.ROC: there are no genuine or no impostor pairs, and so no accept rates")
        return None
    few = [f"{rate:.10g}" for rate in protocol.false_accept_rates if rate * curve.num_impostor < 1]
    if few:
        logger.warning("TEST.ROC.FAR %s: of %d impostor pairs none may be accepted", ", ".join(few), curve.num_impostor)
    return curve


def _distances(queries: torch.Tensor, gallery: torch.Tensor, protocol: Protocol) -> DistanceBlocks:
    search = {"backend": protocol.backend, "memory_budget_mb": protocol.memory_budget_mb}
    if protocol.expansion:
        queries, gallery = expand(queries, gallery, protocol.expansion, **search)
    if protocol.re_ranking:
        return ReRankedDistances(queries, gallery, metric=protocol.metric, options=protocol.re_ranking, **search)
    return FeatureDistances(queries, gallery, metric=protocol.metric, memory_budget_mb=protocol.memory_budget_mb)


def _explain_no_match(count: int, protocol: Protocol) -> str:
    if protocol.draws_queries:
        return f"none of the {count} images has a match: no identity has two images"
    if not protocol.cross_camera:
        return f"none of the {count} queries has a match in the gallery: they have no identity in common"
    return (
        f"none of the {count} queries has a match in the gallery (the same identity from another camera).\n"
        "  cause: query and gallery have no identity in common, or all images are from one camera\n"
        "  fix: for images without cameras TEST.PROTOCOL no_camera"
    )
