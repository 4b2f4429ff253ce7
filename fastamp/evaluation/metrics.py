"""Compute metrics from features: query expansion, distances in blocks, re-ranking, ranking and verification."""

import logging
import math
from typing import Any

import torch

from fastamp.amp import force_fp32
from fastamp.evaluation.collapse import count_indistinct
from fastamp.evaluation.identities import Identities
from fastamp.evaluation.protocol import Protocol, check_evaluable, no_match_error
from fastamp.evaluation.query_expansion import expand
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.ranking_rule import Ranker
from fastamp.evaluation.rerank import ReRankedDistances
from fastamp.evaluation.result import EvaluationResult, summarize
from fastamp.evaluation.retrieval_examples import ExampleCounter, ReportOptions, rank_lists
from fastamp.evaluation.roc import RocCounter, RocCurve, distance_limit
from fastamp.layers.distance import DistanceBlocks, FeatureDistances
from fastamp.utils import comm
from fastamp.utils.errors import DataError
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)


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

    Returns:
        The result, identical on all ranks except for the rank lists, which only rank 0 computes.

    Raises:
        ConfigError: if the weights of query expansion overflow.
        DataError: if the test set cannot be evaluated, see ``check_evaluable``, or the features are invalid, see
            ``check_features``.
        NoMatchError: if no query has a match.
    """
    protocol = protocol or Protocol()
    rule = protocol.rule
    check_evaluable(identities, protocol)
    check_features(query_features, gallery_features, identities, protocol.dtype(torch.float64))
    dtype = protocol.dtype(torch.promote_types(query_features.dtype, gallery_features.dtype))
    num_indistinct = count_indistinct(query_features, gallery_features, identities, metric=protocol.metric, dtype=dtype)
    if rule.all_images:
        query_features = gallery_features = torch.cat((query_features, gallery_features))
    ranked = rule.arrange(identities)
    blocks = distances_of(query_features, gallery_features, protocol) if distances is None else distances

    counters: list[RocCounter | ExampleCounter] = []
    roc = example_counter = limit = None
    if protocol.false_accept_rates is not None or (report_options and len(rule.draws) < 2):
        limit = comm.broadcast_scalar(distance_limit(blocks))
    if protocol.false_accept_rates is not None and limit is not None:
        counters.append(roc := RocCounter(ranked, limit=limit, junk=rule.junk))
    if report_options:
        example_counter = ExampleCounter(ranked, rule, report_options, limit=limit if roc is None else None)
        counters.append(example_counter)
    ranker = rule.ranker(ranked, protocol.metric)
    ranking = rank_blocks(blocks, ranker, *counters)
    if ranking.num_valid == 0:  # in none of the random galleries
        raise no_match_error(identities, rule)

    curve, examples = _curve(roc, protocol), None
    if report_options and example_counter is not None:
        lists = rank_lists(ranking, blocks, ranker.matches, rule, report_options) if comm.is_main_process() else {}
        examples = example_counter.result(lists, curve)
    groups = ranked.query_texts(protocol.group_by) if protocol.group_by else None
    return EvaluationResult(protocol, ranking, curve, ranker.num_gallery, examples, num_indistinct, groups)


def rank_blocks(blocks: DistanceBlocks, ranker: Ranker, *counters: RocCounter | ExampleCounter) -> RankingResult:
    """Rank the gallery by the distances of this rank's part of the queries, and gather the results of all ranks.

    Args:
        blocks: distances of the queries to the gallery images.
        ranker: ranker.
        counters: further objects to which the blocks are added.
    """
    start, stop = comm.shard_range(blocks.shape[0], blocks.block_rows)
    for first, block in track(blocks.blocks(start, stop), -(-(stop - start) // blocks.block_rows), "ranking"):
        for counter in counters:
            counter.add(first, block)
        ranker.add(first, block)  # last, because it overwrites the distances of junk
    result = ranker.result()
    columns = (result.ap, result.inp, result.first_match, result.extra)
    return RankingResult(*(comm.gather_rows(column) for column in columns if column is not None))


@torch.no_grad()
@force_fp32
def rank_metrics(blocks: DistanceBlocks, identities: Identities, protocol: Protocol) -> dict[str, Any]:
    """Compute the metrics of a ranking by given distances, without confidence intervals, groups and verification.

    Args:
        blocks: cosine distances of the queries to the gallery images.
        identities: identities of these images, as ``RankingRule.arrange`` returns them.
        protocol: protocol, of which only the rule and the ranks are used.

    Returns:
        The metrics of ``EvaluationResult.metrics`` that can be computed for features of any model.
    """
    rule = protocol.rule.for_baselines()
    ranker = rule.ranker(identities, "cosine")
    return summarize(rank_blocks(blocks, ranker), rule, protocol.ranks, ranker.num_gallery)


def baseline_metrics(
    query_features: torch.Tensor, gallery_features: torch.Tensor, identities: Identities, protocol: Protocol, name: str
) -> dict[str, Any]:
    """Compute the metrics of a baseline on a test set that ``compute_metrics`` has evaluated, by cosine distances.

    Args:
        query_features: (Q, D) float32.
        gallery_features: (G, D) float32.
        identities: identities and cameras of the Q query and G gallery images.
        protocol: evaluation protocol; see ``rank_metrics``.
        name: name of the baseline, for warnings.
    """
    num_indistinct = count_indistinct(
        query_features, gallery_features, identities, metric="cosine", dtype=torch.float32, baseline=name
    )
    if protocol.rule.all_images:
        query_features = gallery_features = torch.cat((query_features, gallery_features))
    blocks = FeatureDistances(
        query_features, gallery_features, metric="cosine", memory_budget_mb=protocol.memory_budget_mb
    )
    metrics = rank_metrics(blocks, protocol.rule.arrange(identities), protocol)
    return metrics | ({"num_indistinct": num_indistinct} if num_indistinct else {})


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


def check_features(
    query_features: torch.Tensor, gallery_features: torch.Tensor, identities: Identities, dtype: torch.dtype
) -> None:
    """Validate query and gallery features before ranking.

    Args:
        query_features: (Q, D) float.
        gallery_features: (G, D) float.
        identities: identities and cameras of the Q query and G gallery images.
        dtype: dtype of distances between float64 features. Distances between features of other dtypes are float32.

    Raises:
        DataError: if shapes do not match, features are not finite, or their squared distances overflow.
    """
    for name, features, pids, camids in (
        ("query", query_features, identities.query_pids, identities.query_camids),
        ("gallery", gallery_features, identities.gallery_pids, identities.gallery_camids),
    ):
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
