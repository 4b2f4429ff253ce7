"""Settings of an evaluation: the ranking rule and all others, and checks that a test set can be evaluated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.evaluation.identities import CAMERA, SAME_CAMERA, Identities
from fastamp.evaluation.neighbors import BACKENDS
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, Market1501, RankingRule
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, DataError, NoMatchError, check_choice, did_you_mean
from fastamp.utils.missing import MISSING


def accept_rate_name(rate: float) -> str:
    """Return the metric name of the true accept rate at the false accept rate ``rate``, e.g. ``TAR@FAR=0.001``."""
    return f"TAR@FAR={rate:.10g}"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of an evaluation.

    Attributes:
        metric: ``"cosine"`` (default) or ``"euclidean"``.
        rule: ranking rule. Default: that of Market-1501.
        seed: seed of the bootstrap, and of the pairs sampled for reports. Default: 0.
        ranks: ranks at which to report the CMC. Default: 1, 5, 10.
        resamples: number of bootstrap resamples for the 95 % confidence intervals of mAP and Rank-1. Default: 1000; 0
            disables them.
        false_accept_rates: false accept rates in 0..1 at which to report the true accept rate. Default: None, no
            verification.
        expansion: query expansion. Default: None.
        re_ranking: re-ranking. Default: None.
        backend: backend of ``nearest_neighbors``. Default: ``"auto"``.
        memory_budget_mb: memory for distances in MiB. Default: 256.
        group_by: column, or ``"camera"``, by whose value in the query the metrics are also computed. Default: "", no
            groups.

    Raises:
        ConfigError: if a value is unknown, or settings are incompatible.
    """

    metric: str = "cosine"
    rule: RankingRule = field(default_factory=Market1501)
    seed: int = 0
    ranks: tuple[int, ...] = (1, 5, 10)
    resamples: int = 1000
    false_accept_rates: tuple[float, ...] | None = None
    expansion: QueryExpansion | None = None
    re_ranking: ReRanking | None = None
    backend: str = "auto"
    memory_budget_mb: float = 256
    group_by: str = ""

    def __post_init__(self) -> None:
        check_metric(self.metric)
        check_choice("TEST.KNN_BACKEND", self.backend, BACKENDS)
        parts = {"RERANK": self.re_ranking, "AQE": self.expansion, "ROC": self.false_accept_rates}
        for name, part in parts.items():
            if part is not None and (self.rule.draws or (self.rule.all_images and name != "ROC")):
                ranks = "draws images at random" if self.rule.draws else "ranks each image against all others"
                raise ConfigError(
                    f"TEST.{name}.ENABLED=True requires a fixed gallery, but TEST.PROTOCOL={self.rule.name} {ranks}.\n"
                    f"  fix: set TEST.{name}.ENABLED False, or TEST.PROTOCOL no_camera to use the fixed gallery"
                )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "Protocol":
        """Build the settings from ``cfg.TEST``.

        Raises:
            ConfigError: if a value is invalid, or settings are incompatible.
        """
        test = cfg.TEST
        return cls(
            metric=test.METRIC,
            rule=PROTOCOL_REGISTRY.build(test.PROTOCOL, cfg),
            seed=test.SEED,
            ranks=tuple(sorted({1, 5, 10, *test.RANKS})),
            resamples=test.BOOTSTRAP,
            false_accept_rates=tuple(sorted(test.ROC.FAR)) if test.ROC.ENABLED else None,
            expansion=QueryExpansion.from_config(cfg) if test.AQE.ENABLED else None,
            re_ranking=ReRanking.from_config(cfg) if test.RERANK.ENABLED else None,
            backend=test.KNN_BACKEND,
            memory_budget_mb=test.MEMORY_BUDGET_MB,
            group_by=test.GROUP_BY,
        )

    def metric_names(self) -> list[str]:
        """List the names of the metrics in percent that ``EvaluationResult.metrics`` computes with these settings.

        The names are known before an evaluation, so that the config can select the metric for the best model.
        """
        return self.rule.metric_names(self.ranks) + [accept_rate_name(rate) for rate in self.false_accept_rates or ()]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the evaluation needs."""
        own = self.rule.columns
        return own if self.group_by in ("", CAMERA, *own) else (*own, self.group_by)

    def dtype(self, features: torch.dtype) -> torch.dtype:
        """Return the dtype of distances: float64 for float64 features if AQE and re-ranking are off, else float32."""
        if features == torch.float64 and self.expansion is None and self.re_ranking is None:
            return torch.float64
        return torch.float32

    def describe(self, features: torch.dtype = torch.float32) -> str:
        """Describe the evaluation in one line, for features of the given dtype."""
        parts = [
            f"{self.metric} distance in {str(self.dtype(features)).removeprefix('torch.')}",
            self.rule.describe(),
            "trapezoid AP" if self.rule.trapezoid else "",
            str(self.expansion or ""),
            str(self.re_ranking or "no re-ranking"),
        ]
        return "; ".join(filter(None, parts))


def check_evaluable(identities: Identities, protocol: Protocol) -> None:
    """Check that a test set can be evaluated.

    Args:
        identities: identities, cameras and columns of the query and gallery images.
        protocol: evaluation protocol.

    Raises:
        DataError: if there are no queries or, unless the rule ranks all images, no gallery images; if a column is
            missing; or if the rule cannot rank these images, see ``RankingRule.check``.
        NoMatchError: if no query has a match.
    """
    check_columns(identities.columns, protocol)
    for name, pids in (("query", identities.query_pids), ("gallery", identities.gallery_pids)):
        if not len(pids) and (name == "query" or not protocol.rule.all_images):
            raise DataError(
                f"the {name} set is empty: at least one image is required.\n"
                f"  fix: choose a test set or file that contains {name} images"
            )
    protocol.rule.check(identities)
    if not any(counts.any() for counts in count_matches(identities, protocol.rule)):
        raise no_match_error(identities, protocol.rule)


def check_columns(available: Iterable[str], protocol: Protocol) -> None:
    """Check that each column that the evaluation needs is available.

    Raises:
        DataError: if a column is missing; the message lists the available columns.
    """
    names = sorted(available)
    for name in protocol.columns:
        if name not in names:
            usable, needed_by, fix = names, f"TEST.PROTOCOL={protocol.rule.name}", protocol.rule.column_fix(name)
            if name not in protocol.rule.columns:
                usable, needed_by, fix = [CAMERA, *names], f"TEST.GROUP_BY={name}", "change TEST.GROUP_BY"
            raise DataError(
                f"{needed_by} needs the column {name!r} with one number or text for each image, which the test set "
                f"does not have.{did_you_mean(name, usable)}\n"
                f"  available columns: {', '.join(usable) or 'none'}\n"
                f"  fix: add the column to the test set, or {fix}"
            )


def count_matches(identities: Identities, rule: RankingRule) -> Iterator[np.ndarray]:
    """Count the matches of each query, in blocks of queries.

    Args:
        identities: identities, cameras and columns of the test set.
        rule: ranking rule.

    Yields:
        (B,) int64, number of matches of the next queries; of all images, if the rule ranks all images.
    """
    matches = rule.matches(rule.arrange(identities))
    for first, last in matches.spans(0, len(matches.query_pids)):
        yield np.bincount(matches.pairs(first, last).rows, minlength=last - first)


def no_match_error(identities: Identities, rule: RankingRule) -> NoMatchError:
    """Build the error for a test set in which no query has a match."""
    sides = [set(pids.tolist()) for pids in (identities.query_pids, identities.gallery_pids)]
    common = sides[0] & sides[1] - ({MISSING} if rule.trapezoid else set())
    fix = "give the images of an identity the same name or number in query and gallery"
    if rule.all_images:
        cause = "each identity has only one image"
    elif not common:
        cause = f"query and gallery have no identity in common (query: {len(sides[0])}, gallery: {len(sides[1])})"
    elif rule.junk is SAME_CAMERA:
        cause = f"the gallery images of each of the {len(common)} common identities are from the camera of the query"
        fix = "add gallery images from other cameras; or, if cameras do not matter, set TEST.PROTOCOL to no_camera"
    else:
        cause = f"TEST.PROTOCOL={rule.name} excludes all images of the {len(common)} common identities as junk"
        fix = "check the test set and the junk of this rule"
    queries = f"{len(rule.arrange(identities).query_pids)} {'images' if rule.all_images else 'queries'}"
    return NoMatchError(f"none of the {queries} has a match in the gallery: {cause}.\n  fix: {fix}")
