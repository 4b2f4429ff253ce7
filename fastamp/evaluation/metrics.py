"""Compute metrics from features: query expansion, distances in blocks, re-ranking, ranking and verification."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastamp.amp import force_fp32
from fastamp.evaluation.collapse import count_indistinct
from fastamp.evaluation.identities import JUNK_PID, SAME_CAMERA, Identities, Matches
from fastamp.evaluation.protocol import Protocol, Ranker, accept_rate_name, recall_name
from fastamp.evaluation.query_expansion import expand
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.rerank import ReRankedDistances
from fastamp.evaluation.retrieval_examples import ExampleCounter, ReportOptions, RetrievalExamples, rank_lists
from fastamp.evaluation.roc import RocCounter, RocCurve, distance_limit
from fastamp.layers.distance import DistanceBlocks, FeatureDistances
from fastamp.utils import comm
from fastamp.utils.errors import DataError, NoMatchError
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

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

        To add a metric in percent, compute it here and add its name to ``Protocol.metric_names``. The table in the log
        shows every float (``results_table``); ``fastamp.report.sections._tiles`` selects the metrics of a report.

        Returns:
            In percent, as float: ``Rank-r`` for each rank, ``mAP``, ``mINP``, ``metric`` (mean of mAP and Rank-1), with
            ``RankingRule.recall`` also ``Recall@r``, and, with verification, ``TAR@FAR=f``. As int: ``num_query``,
            ``num_gallery``, ``num_query_without_match`` and, if it is not 0, ``num_indistinct``. ``intervals``: ``mAP``
            and ``Rank-1`` -> [low, high] of the 95 % bootstrap confidence interval. With ``TEST.GROUP_BY``, ``groups``:
            see ``group_metrics``, and ``mean_over_groups``: metric -> mean over the groups that have a query with a
            match.
        """
        ranking = self.ranking
        metrics: dict[str, Any] = self._rates(ranking)
        if self.roc is not None:
            for rate in self.protocol.false_accept_rates or ():
                metrics[accept_rate_name(rate)] = 100 * self.roc.tar_at(rate)
        metrics |= _query_counts(ranking, metrics)
        metrics["num_gallery"] = self.num_gallery
        rule = self.protocol.ranking_rule
        if rule.random_query_gallery_split or rule.random_queries:  # counts of one trial
            draws = ranking.first_match.shape[1]
            metrics["num_query"], metrics["num_query_without_match"] = int(ranking.trials.sum()) // draws, 0
        if self.num_indistinct:
            metrics["num_indistinct"] = self.num_indistinct
        if self.protocol.resamples:
            metrics["intervals"] = self.intervals()
        if self.groups is not None:
            metrics["groups"] = self.group_metrics()
            rates = [self._rates(ranking) for ranking in self._group_rankings().values()]
            names = dict.fromkeys(name for rate in rates for name, value in rate.items() if isinstance(value, float))
            metrics["mean_over_groups"] = {
                name: float(np.mean([rate[name] for rate in rates if name in rate])) for name in names
            }
        return metrics

    def group_metrics(self) -> dict[str, dict[str, Any]]:
        """Compute the metrics of the queries with each value of ``TEST.GROUP_BY``.

        Returns:
            Value -> dict with the metrics in percent, for groups that have a query with a match, and the counts
            ``num_query`` and ``num_query_without_match``.
        """
        return {
            value: {**(metrics := self._rates(rows)), **_query_counts(rows, metrics)}
            for value, rows in self._group_rankings().items()
        }

    def _group_rankings(self) -> dict[str, RankingResult]:
        """Return value of ``TEST.GROUP_BY`` -> results of its queries; numbers in ascending order, then texts."""
        groups = self.groups if self.groups is not None else np.empty(0, dtype=str)
        return {
            value: self.ranking.select(torch.from_numpy(groups == value))
            for value in sorted(np.unique(groups).tolist(), key=_number_before_text)
        }

    def _rates(self, ranking: RankingResult) -> dict[str, Any]:
        """Compute the metrics over queries of this result, in percent; without CMC and mAP if none has a match."""
        rates: dict[str, Any] = {}
        rule = self.protocol.ranking_rule
        if ranking.num_valid:
            rates = {f"Rank-{rank}": 100 * ranking.cmc(rank) for rank in self.protocol.ranks}
            rates |= {"mAP": 100 * ranking.mean_ap, "mINP": 100 * ranking.mean_inp}
            rates["metric"] = (rates["mAP"] + rates["Rank-1"]) / 2
            if rule.recall:
                rates |= {recall_name(rank): rates[f"Rank-{rank}"] for rank in self.protocol.ranks}
        if rule.further_metrics is not None:
            rates |= rule.further_metrics(ranking, self.ranking)
        return rates

    def intervals(self) -> dict[str, list[float]]:
        """Compute 95 % percentile bootstrap confidence intervals of mAP and Rank-1 over queries, in percent."""
        ranking = self.ranking
        weights = ranking.trials[ranking.valid].numpy()
        values = {"mAP": ranking.ap, "Rank-1": ranking.hits(1)}
        weighted = {name: per_query[ranking.valid].numpy() * weights for name, per_query in values.items()}
        generator = np.random.default_rng(self.protocol.seed)
        means: dict[str, list[np.ndarray]] = {name: [] for name in values}
        count, remaining = len(weights), self.protocol.resamples
        equal_weights = bool((weights == weights[0]).all())
        while remaining:
            size = min(remaining, max(1, _RESAMPLED // count))
            chosen = generator.integers(0, count, (size, count), dtype=np.int32)
            total = count * weights[0] if equal_weights else weights[chosen].sum(1)
            for name, per_query in weighted.items():
                means[name].append(per_query[chosen].sum(1) / total)
            remaining -= size
        return {
            name: [100 * float(bound) for bound in np.quantile(np.concatenate(parts), _INTERVAL)]
            for name, parts in means.items()
        }


def _query_counts(ranking: RankingResult, metrics: dict[str, Any]) -> dict[str, int]:
    """Count the queries without those for validation, if ``metrics`` has their number."""
    num_query = len(ranking.ap) - metrics.get("num_validation", 0)
    return {"num_query": num_query, "num_query_without_match": num_query - ranking.num_valid}


def _number_before_text(value: str) -> tuple[bool, float, str]:
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


@torch.no_grad()
@force_fp32
def compute_metrics(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    identities: Identities,
    protocol: Protocol | None = None,
    report_options: ReportOptions | None = None,
    *,
    distances: DistanceBlocks | None = None,
    baseline: str = "",
) -> EvaluationResult:
    """Compute CMC, mAP, mINP and verification metrics from query and gallery features.

    In a distributed run, every rank must pass all features; the queries are distributed over the ranks.

    Args:
        query_features: (Q, D) float, any precision.
        gallery_features: (G, D) float, on the same device; the metrics are computed on this device.
        identities: identities and cameras of the Q query and G gallery images.
        protocol: evaluation protocol. Default: Market-1501 with cosine distance.
        report_options: settings of the retrieval examples. Default: no examples.
        distances: distances of the queries to the gallery images, instead of those between the features. Default: None.
        baseline: name of the baseline that computed the features, for warnings. Default: "", they are of a model.

    Returns:
        The result, identical on all ranks except for the rank lists, which only rank 0 computes.

    Raises:
        ConfigError: if the weights of query expansion overflow.
        DataError: if the features are invalid, see ``check_features``, or a column is missing.
        NoMatchError: if no query has a match.
    """
    protocol = protocol or Protocol()
    protocol.check_columns(identities.columns)
    check_features(
        query_features,
        gallery_features,
        identities,
        protocol.dtype(torch.float64),
        needs_gallery=not protocol.all_images,
    )
    dtype = protocol.dtype(torch.promote_types(query_features.dtype, gallery_features.dtype))
    num_indistinct = count_indistinct(
        query_features, gallery_features, identities, metric=protocol.metric, dtype=dtype, baseline=baseline
    )

    if protocol.all_images:
        query_features = gallery_features = torch.cat((query_features, gallery_features))
        identities = protocol.arrange(identities)
    blocks = distances_of(query_features, gallery_features, protocol) if distances is None else distances

    roc = example_counter = limit = None
    if protocol.false_accept_rates is not None or (report_options and not protocol.random_query_gallery_split):
        limit = comm.broadcast_scalar(distance_limit(blocks))
    if protocol.false_accept_rates is not None and limit is not None:
        roc = RocCounter(identities, limit=limit, junk=protocol.junk)
    if report_options:
        example_counter = ExampleCounter(identities, protocol, report_options, limit=limit if roc is None else None)
    ranker = protocol.ranker(identities)

    start, stop = comm.shard_range(len(query_features), blocks.block_rows)
    for first, block in track(blocks.blocks(start, stop), -(-(stop - start) // blocks.block_rows), "ranking"):
        if roc is not None:
            roc.add(first, block)
        if example_counter is not None:
            example_counter.add(first, block)
        ranker.add(first, block)  # last, because it overwrites the distances of junk
    local_ranking = ranker.result()
    columns = (local_ranking.ap, local_ranking.inp, local_ranking.first_match, local_ranking.extra)
    ranking = RankingResult(*(comm.gather_rows(column) for column in columns if column is not None))
    if ranking.num_valid == 0:
        raise NoMatchError(_explain_no_match(identities, protocol))

    curve, examples = _curve(roc, protocol), None
    if report_options and example_counter is not None:
        lists = rank_lists(ranking, blocks, ranker.matches, protocol, report_options) if comm.is_main_process() else {}
        examples = example_counter.result(lists, curve)
    groups = identities.query_texts(protocol.group_by) if protocol.group_by else None
    return EvaluationResult(protocol, ranking, curve, ranker.num_gallery, examples, num_indistinct, groups)


def distances_of(query_features: torch.Tensor, gallery_features: torch.Tensor, protocol: Protocol) -> DistanceBlocks:
    """Return the distances by which a protocol ranks the gallery, including query expansion and re-ranking.

    Args:
        query_features: (Q, D) float, any precision.
        gallery_features: (G, D) float, on the same device.
        protocol: evaluation protocol.

    Raises:
        ConfigError: if the weights of query expansion overflow.
    """
    search: dict[str, Any] = {"backend": protocol.backend, "memory_budget_mb": protocol.memory_budget_mb}
    if protocol.expansion:
        query_features, gallery_features = expand(query_features, gallery_features, protocol.expansion, **search)
    if protocol.re_ranking:
        options = protocol.re_ranking
        return ReRankedDistances(query_features, gallery_features, metric=protocol.metric, options=options, **search)
    return FeatureDistances(
        query_features, gallery_features, metric=protocol.metric, memory_budget_mb=protocol.memory_budget_mb
    )


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


def check_features(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    identities: Identities,
    dtype: torch.dtype = torch.float64,
    *,
    needs_gallery: bool = True,
) -> None:
    """Validate query and gallery features before ranking.

    Args:
        query_features: (Q, D) float.
        gallery_features: (G, D) float.
        identities: identities and cameras of the Q query and G gallery images.
        dtype: dtype of distances between float64 features. Distances between features of other dtypes are float32.
            Default: float64.
        needs_gallery: if False, there may be no gallery images. Default: True.

    Raises:
        DataError: if a set is empty, shapes do not match, features are not finite, or their squared distances overflow.
    """
    for name, features, pids, camids in (
        ("query", query_features, identities.query_pids, identities.query_camids),
        ("gallery", gallery_features, identities.gallery_pids, identities.gallery_camids),
    ):
        if len(features) == 0 and (name == "query" or needs_gallery):
            raise DataError(
                f"the {name} set is empty: at least one image is required.\n"
                f"  fix: choose a test set or file that contains {name} images"
            )
        if features.dim() != 2 or not len(features) == len(pids) == len(camids):
            raise DataError(
                f"shape mismatch in the {name} set: expected features (N, D), with one identity and camera for each "
                f"image; got features {tuple(features.shape)}, {len(pids)} identities and {len(camids)} cameras.\n"
                "  fix: pass arrays of the same images"
            )
        if len(features):
            check_finite_features(name, features, dtype)
    if query_features.shape[1] != gallery_features.shape[1]:
        raise DataError(
            f"shape mismatch: query features have {query_features.shape[1]} dimensions, but gallery features "
            f"have {gallery_features.shape[1]}\n  fix: extract both with the same model"
        )


def check_finite_features(name: str, features: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that features (N, D) have dimensions, are finite, and have squared distances that do not overflow.

    Args:
        name: name of the set for messages, e.g. ``"query"``.
        features: (N, D) float with N at least 1.
        dtype: dtype of the distances of float64 features.

    Raises:
        DataError: if they are not.
    """
    if features.numel() == 0:
        raise DataError(
            f"the {name} features have 0 dimensions; expected at least 1.\n"
            "  fix: extract the features again, with a model whose features have at least one dimension"
        )
    low, high = (bound.item() for bound in torch.aminmax(features))
    largest = max(abs(low), abs(high))
    if not math.isfinite(largest):
        bad = (~torch.isfinite(features).all(1)).nonzero().flatten().tolist()
        raise DataError(
            f"{name} features are not finite: {len(bad)} of {len(features)} contain NaN or Inf (first indices: "
            f"{', '.join(map(str, bad[:5]))})\n"
            "  cause: training diverged, the weights or normalization buffers are corrupt, or float16 overflowed\n"
            "  fix: lower SOLVER.BASE_LR, or use an older checkpoint; for float16, set SOLVER.AMP.EVAL_DTYPE to float32"
        )
    dtype = torch.float32 if features.dtype != torch.float64 else dtype
    limit = math.sqrt(torch.finfo(dtype).max / features.shape[1]) / 2
    if largest > limit:
        raise DataError(
            f"{name} features are too large: they contain values up to {largest:.3g}, but squared "
            f"distances of {features.shape[1]} dimensions overflow in {str(dtype).removeprefix('torch.')} for "
            f"values above {limit:.3g}.\n"
            "  fix: divide the features by a constant, or use an earlier checkpoint"
        )


def _curve(roc: RocCounter | None, protocol: Protocol) -> RocCurve | None:
    """Compute the ROC curve over the pairs of all ranks; warn if it or a false accept rate cannot be measured."""
    if roc is None:
        return None
    curve = roc.result()
    if curve is None:
        logger.warning(
            "accept rates (TEST.ROC) are not computed, because there are no genuine or no impostor pairs.\n"
            "  fix: set TEST.ROC to False, or use a test set with matches and with several identities"
        )
        return None
    unreachable = [f"{rate:.10g}" for rate in protocol.false_accept_rates or () if rate * curve.num_impostor < 1]
    if unreachable:
        logger.warning(
            "false accept rates in TEST.ROC.FAR are too low to be measured: %s (there are only %d impostor pairs).\n"
            "  fix: increase these rates, or use a larger test set",
            ", ".join(unreachable),
            curve.num_impostor,
        )
    return curve


def check_matches(identities: Identities, protocol: Protocol) -> None:
    """Check by the labels only, without features, that at least one query has a match.

    Args:
        identities: identities, cameras and columns of the query and gallery images.
        protocol: evaluation protocol.

    Raises:
        NoMatchError: if no query has a match.
    """
    arranged = protocol.arrange(identities)
    matches = Matches(arranged, junk=protocol.junk, unmatched_pid=JUNK_PID if protocol.trapezoid else None)
    for first, last in matches.spans(0, len(matches.query_pids)):
        pairs = matches.pairs(first, last)
        if protocol.all_images:  # an image is not a match of itself
            pairs = replace(pairs, rows=pairs.rows[first + pairs.rows != pairs.columns])
        if len(pairs.rows):
            return
    raise NoMatchError(_explain_no_match(arranged, protocol))


def _explain_no_match(identities: Identities, protocol: Protocol) -> str:
    fix = "give the images of an identity the same name or number in query and gallery"
    if protocol.all_images:
        count = len(identities.query_pids)
        return f"none of the {count} images has a match: each identity has only one image.\n  fix: {fix}"
    sides = [set(pids.tolist()) for pids in (identities.query_pids, identities.gallery_pids)]
    common = sides[0] & sides[1] - ({JUNK_PID} if protocol.trapezoid else set())
    none = f"none of the {len(identities.query_pids)} queries has a match in the gallery"
    if not common:
        return (
            f"{none}: query and gallery have no identity in common (query: {len(sides[0])}, gallery: "
            f"{len(sides[1])}).\n  fix: {fix}"
        )
    if protocol.junk is not SAME_CAMERA:
        return (
            f"{none}: the rule of TEST.PROTOCOL={protocol.rule} excludes all images of the {len(common)} common "
            "identities as junk.\n  fix: check the test set and the junk of this rule"
        )
    return (
        f"{none} (the same identity from another camera): the gallery images of each of the {len(common)} common "
        "identities are from the camera of the query.\n"
        "  fix: add gallery images from other cameras; or, if cameras do not matter, set TEST.PROTOCOL to no_camera"
    )
