"""Evaluation protocols: rules that select the gallery images for each query, and other evaluation settings.

``PROTOCOL_REGISTRY`` maps each value of ``TEST.PROTOCOL`` to its rule. The rule's ``Junk`` defines which gallery images
are excluded for a query (``identities``). Under every rule, trapezoidal AP and sampled pairs also exclude gallery
images of identity -1 (``Matches.unmatched``). The protocols of a field are in their own modules: ``single_shot``,
``cross_modality``, ``cloth_changing``, ``tracklets`` and ``product_retrieval``.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.config.key import Key
from fastamp.evaluation.identities import (
    CAMERA,
    JUNK_PID,
    SAME_CAMERA,
    Identities,
    Junk,
    Matches,
    Pairs,
)
from fastamp.evaluation.neighbors import BACKENDS
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rank import RankingResult, query_scores, ranks_of_matches
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, DataError, check_choice, did_you_mean
from fastamp.utils.registry import Registry

KEYS = (
    Key(
        "TEST.PROTOCOL",
        "market1501",
        "Name of a registered protocol: which gallery images count for each query, and how. market1501 excludes "
        "images of the query's identity and camera; no_camera excludes no images; the guide to evaluation lists all.",
    ),
)


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


def build_ranker(identities: Identities, protocol: "Protocol") -> Ranker:
    """Build a ``Ranker``, which ranks all gallery images."""
    return Ranker(identities, junk=protocol.junk, trapezoid=protocol.trapezoid)


@dataclass(frozen=True, kw_only=True)
class RankingRule:
    """Rule that selects queries and gallery images, and counts ranks.

    Attributes:
        text: description for the log: a format string whose argument 0 is the protocol, e.g. ``{0.num_trials}``.
        junk: junk rule; None for no junk. ``SAME_CAMERA`` requires camera labels; custom rules may also require them.
        build: function (identities, protocol) -> ranker. Default: ``build_ranker``.
        random_query_gallery_split: if True, queries and gallery are drawn at random from all images, so distances
            between all images are required. Default: False.
        columns: names of the columns that the rule needs in ``Identities.columns``. Default: none.
        column_keys: for each of ``columns``, what to change in the config if it is missing. Default: TEST.PROTOCOL.
        check_cameras: function (query cameras, gallery cameras) that raises ``DataError`` if the rule needs others.
            Default: None, for any cameras.
        random_gallery: if True, the ranker draws gallery images at random. Default: False.
        random_queries: if True, the ranker draws queries at random. Default: False.
        all_images: if True, each image, query or gallery, is a query against all images. Default: False.
        trapezoid: if True, the rule always uses trapezoidal AP, see ``Ranker``. Default: False.
        recall: if True, the CMC at rank k is also reported as ``Recall@k``. Default: False.
        open_set: if True, queries without a match are expected, and the rule predicts which they are. Default: False.
        closed_set: if True, the identities of the gallery are meant to be in the training set. Default: False.
        configure: function config -> rule, for a rule with config keys of its own. Default: None, the rule itself.
        further_metrics: function (results of some queries, results of all queries) -> metrics in percent, computed from
            ``RankingResult.extra``. Metrics that are not defined are listed under ``not_defined``. Default: None.
        further_names: names of the metrics that ``further_metrics`` can return. Default: none.
        is_calibrated: True if ``further_metrics`` uses a value that is valid for the features of one model only; the
            baselines then do not compute them. Default: False.
    """

    text: str
    junk: Junk | None
    build: Callable[[Identities, "Protocol"], Ranker] = build_ranker
    random_query_gallery_split: bool = False
    columns: tuple[str, ...] = ()
    column_keys: tuple[str, ...] = ()
    check_cameras: Callable[[Collection[int], Collection[int]], object] | None = None
    random_gallery: bool = False
    random_queries: bool = False
    all_images: bool = False
    trapezoid: bool = False
    recall: bool = False
    open_set: bool = False
    closed_set: bool = False
    configure: Callable[[Any], "RankingRule"] | None = None
    further_metrics: Callable[[RankingResult, RankingResult], dict[str, Any]] | None = None
    further_names: tuple[str, ...] = ()
    is_calibrated: bool = False


RULES: dict[str, RankingRule] = {}
"""Rule for each value of ``TEST.PROTOCOL``, as a dict: the components of ``PROTOCOL_REGISTRY``."""

PROTOCOL_REGISTRY = Registry("TEST.PROTOCOL", RULES)
"""Registry of ``RankingRule`` objects: ``PROTOCOL_REGISTRY.register("name")(RankingRule(...))``."""

PROTOCOL_REGISTRY.register("market1501")(
    RankingRule(text="Market-1501 (images of the query's identity and camera are junk)", junk=SAME_CAMERA)
)
PROTOCOL_REGISTRY.register("no_camera")(RankingRule(text="no cameras (no junk)", junk=None))


def accept_rate_name(rate: float) -> str:
    """Return the metric name of the true accept rate at the false accept rate ``rate``, e.g. ``TAR@FAR=0.001``."""
    return f"TAR@FAR={rate:.10g}"


def recall_name(rank: int) -> str:
    """Return the metric name of the recall at k, e.g. ``Recall@10``."""
    return f"Recall@{rank}"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of an evaluation.

    Attributes:
        metric: ``"cosine"`` (default) or ``"euclidean"``.
        rule: name in ``PROTOCOL_REGISTRY``. Default: ``"market1501"``.
        trapezoid: if True, compute trapezoidal AP, see ``Ranker``. Default: False.
        num_trials: number of random galleries, for rules that draw them. Default: 10.
        seed: seed of the random galleries and of the bootstrap. Default: 0.
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
        configured_rule: rule with the settings of its own config keys. Default: None, the registered rule.

    Raises:
        ConfigError: if a value is unknown, or settings are incompatible.
    """

    metric: str = "cosine"
    rule: str = "market1501"
    trapezoid: bool = False
    num_trials: int = 10
    seed: int = 0
    ranks: tuple[int, ...] = (1, 5, 10)
    resamples: int = 1000
    false_accept_rates: tuple[float, ...] | None = None
    expansion: QueryExpansion | None = None
    re_ranking: ReRanking | None = None
    backend: str = "auto"
    memory_budget_mb: float = 256
    group_by: str = ""
    configured_rule: RankingRule | None = None

    def __post_init__(self) -> None:
        check_metric(self.metric)
        PROTOCOL_REGISTRY.get(self.rule)
        rule = self.ranking_rule
        check_choice("TEST.KNN_BACKEND", self.backend, BACKENDS)
        parts = {"RERANK": self.re_ranking, "AQE": self.expansion, "ROC": self.false_accept_rates}
        for name, part in parts.items():
            if part is None:
                continue
            if self.draws_images:
                raise ConfigError(
                    f"TEST.{name}.ENABLED=True requires a fixed gallery, but TEST.PROTOCOL={self.rule} draws random "
                    "galleries.\n"
                    f"  fix: set TEST.{name}.ENABLED False, or TEST.PROTOCOL no_camera to use the fixed gallery"
                )
            if self.all_images and name != "ROC":
                raise ConfigError(
                    f"TEST.{name}.ENABLED=True requires separate queries and gallery images, but under TEST.PROTOCOL="
                    f"{self.rule} each image is a query against all others.\n"
                    f"  fix: set TEST.{name}.ENABLED False, or use another TEST.PROTOCOL"
                )
        if rule.trapezoid:
            object.__setattr__(self, "trapezoid", True)
        if self.trapezoid and rule.random_query_gallery_split:
            raise ConfigError(
                f"TEST.AP_METHOD=trapezoid is not supported with TEST.PROTOCOL={self.rule}, because each query has "
                "only one match.\n  fix: set TEST.AP_METHOD to standard"
            )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "Protocol":
        """Build the protocol from ``cfg.TEST``.

        Raises:
            ConfigError: if a value is invalid, or settings are incompatible.
        """
        test = cfg.TEST
        configure = PROTOCOL_REGISTRY.get(test.PROTOCOL).configure
        return cls(
            metric=test.METRIC,
            rule=test.PROTOCOL,
            trapezoid=test.AP_METHOD == "trapezoid",
            num_trials=test.NUM_TRIALS,
            seed=test.SEED,
            ranks=tuple(sorted({1, 5, 10, *test.RANKS})),
            resamples=test.BOOTSTRAP,
            false_accept_rates=tuple(sorted(test.ROC.FAR)) if test.ROC.ENABLED else None,
            expansion=QueryExpansion.from_config(cfg) if test.AQE.ENABLED else None,
            re_ranking=ReRanking.from_config(cfg) if test.RERANK.ENABLED else None,
            backend=test.KNN_BACKEND,
            memory_budget_mb=test.MEMORY_BUDGET_MB,
            group_by=test.GROUP_BY,
            configured_rule=configure(cfg) if configure else None,
        )

    def plain(self) -> "Protocol":
        """Return the protocol for baselines: the same rule, with cosine distances and no re-ranking or expansion."""
        rule = self.ranking_rule
        return replace(
            self,
            metric="cosine",
            resamples=0,
            false_accept_rates=None,
            expansion=None,
            re_ranking=None,
            group_by="",
            configured_rule=replace(rule, further_metrics=None) if rule.is_calibrated else self.configured_rule,
        )

    def metric_names(self) -> list[str]:
        """List the names of the metrics in percent that ``EvaluationResult.metrics`` computes under this protocol.

        The names are known before an evaluation, so that the config can select the metric for the best model.
        """
        names = [*(f"Rank-{rank}" for rank in self.ranks), "mAP", "mINP", "metric"]
        if self.ranking_rule.recall:
            names += [recall_name(rank) for rank in self.ranks]
        names += self.ranking_rule.further_names
        return names + [accept_rate_name(rate) for rate in self.false_accept_rates or ()]

    @property
    def ranking_rule(self) -> RankingRule:
        """Rule that selects queries and gallery images."""
        rule: RankingRule = self.configured_rule or PROTOCOL_REGISTRY.get(self.rule)
        return rule

    @property
    def is_open_set(self) -> bool:
        """True if queries without a match are expected."""
        return self.ranking_rule.open_set

    @property
    def is_closed_set(self) -> bool:
        """True if the identities of the gallery are meant to be in the training set."""
        return self.ranking_rule.closed_set

    @property
    def junk(self) -> Junk | None:
        """Junk rule; None for no junk."""
        return self.ranking_rule.junk

    @property
    def columns(self) -> dict[str, str]:
        """Name of each column that the evaluation needs -> the config key and value that need it."""
        needed = dict.fromkeys(self.ranking_rule.columns, f"TEST.PROTOCOL={self.rule}")
        if self.group_by not in ("", CAMERA, *needed):
            needed[self.group_by] = f"TEST.GROUP_BY={self.group_by}"
        return needed

    def check_columns(self, available: Iterable[str]) -> None:
        """Check that each column that the evaluation needs is available.

        Raises:
            DataError: if a column is missing; the message lists the available columns.
        """
        names = sorted(available)
        keys = dict(zip(self.ranking_rule.columns, self.ranking_rule.column_keys, strict=False))
        for name, needed_by in self.columns.items():
            if name not in names:
                usable = [CAMERA, *names] if name == self.group_by else names
                raise DataError(
                    f"{needed_by} needs the column {name!r} with one number or text for each image, which the test set "
                    f"does not have.{did_you_mean(name, usable)}\n"
                    f"  available columns: {', '.join(usable) or 'none'}\n"
                    f"  fix: add the column to the test set, or {keys.get(name) or 'change ' + needed_by.split('=')[0]}"
                )

    def check_cameras(self, query_cameras: Collection[int], gallery_cameras: Collection[int]) -> None:
        """Check that the rule can evaluate queries and gallery images of these cameras.

        Raises:
            DataError: if it needs others; the message lists those of the test set.
        """
        if self.ranking_rule.check_cameras is not None:
            self.ranking_rule.check_cameras(query_cameras, gallery_cameras)

    @property
    def cross_camera(self) -> bool:
        """True if the rule excludes junk by cameras, so that camera labels are required."""
        return self.junk is not None and self.junk.uses_cameras

    @property
    def random_query_gallery_split(self) -> bool:
        """True if queries and gallery are drawn at random from all images."""
        return self.ranking_rule.random_query_gallery_split

    @property
    def draws_images(self) -> bool:
        """True if queries or gallery images are drawn at random."""
        rule = self.ranking_rule
        return rule.random_query_gallery_split or rule.random_gallery or rule.random_queries

    @property
    def all_images(self) -> bool:
        """True if queries and gallery are all images of the test set."""
        return self.ranking_rule.all_images or self.random_query_gallery_split

    def arrange(self, identities: Identities) -> Identities:
        """Return the identities of the queries and the gallery that the rule ranks, given those of the test set."""
        return identities.all_images() if self.all_images else identities

    def ranker(self, identities: Identities) -> Ranker:
        """Build the ranker for this rule."""
        return self.ranking_rule.build(identities, self)

    def dtype(self, features: torch.dtype) -> torch.dtype:
        """Return the dtype of distances: float64 for float64 features if AQE and re-ranking are off, else float32."""
        if features == torch.float64 and self.expansion is None and self.re_ranking is None:
            return torch.float64
        return torch.float32

    def describe(self, features: torch.dtype = torch.float32) -> str:
        """Describe the protocol in one line, for features of the given dtype."""
        parts = [
            f"{self.metric} distance in {str(self.dtype(features)).removeprefix('torch.')}",
            self.ranking_rule.text.format(self),
            "trapezoid AP" if self.trapezoid else "",
            str(self.expansion or ""),
            str(self.re_ranking or "no re-ranking"),
        ]
        return "; ".join(filter(None, parts))
