"""What is measured and how, as one value that a config is read into and a report states in one line."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastamp.evaluation.matches import Identities
from fastamp.evaluation.neighbours import BACKENDS
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rank import Ranker
from fastamp.evaluation.rerank import ReRanking
from fastamp.evaluation.roc import accept_rate_name
from fastamp.evaluation.single_shot import OneGalleryImageRanker, SingleGalleryShotRanker
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, check_choice


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Who is ranked against whom.

    Attributes:
        text: the rule in words, with the protocol's ``repeats`` and ``seed``.
        build: returns its ranker.
        cross_camera: whether images of the query's identity from its own camera are junk.
        draws_queries: whether query and gallery are drawn from all images, which then are ranked against all.
    """

    text: str
    build: Callable[[Identities, "Protocol"], Ranker]
    cross_camera: bool
    draws_queries: bool = False


RULES = {
    "market1501": Rule(
        text="Market-1501 (images of the query's identity from its own camera are junk)",
        build=lambda ids, protocol: Ranker(ids, trapezoid=protocol.trapezoid),
        cross_camera=True,
    ),
    "no_camera": Rule(
        text="no cameras (no junk)",
        build=lambda ids, protocol: Ranker(ids, cross_camera=False, trapezoid=protocol.trapezoid),
        cross_camera=False,
    ),
    "cuhk03": Rule(
        text="CUHK03 single gallery shot (own camera is junk; CMC over {0.repeats} draws, seed {0.seed})",
        build=lambda ids, protocol: SingleGalleryShotRanker(
            ids, repeats=protocol.repeats, seed=protocol.seed, trapezoid=protocol.trapezoid
        ),
        cross_camera=True,
    ),
    "vehicleid": Rule(
        text="VehicleID (one gallery image of each identity, all others are queries; {0.repeats} draws, seed {0.seed})",
        build=lambda ids, protocol: OneGalleryImageRanker(ids, repeats=protocol.repeats, seed=protocol.seed),
        cross_camera=False,
        draws_queries=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How features are judged.

    Attributes:
        metric: ``"cosine"`` or ``"euclidean"``.
        rule: ``"market1501"``, ``"no_camera"``, ``"cuhk03"`` or ``"vehicleid"``.
        trapezoid: see ``Ranker``.
        repeats: draws of a gallery, under a rule that draws.
        seed: of these draws, and of the bootstrap's.
        ranks: ranks of the CMC that are reported.
        resamples: of the queries, for the 95 % intervals of mAP and Rank-1; 0 leaves them out.
        false_accept_rates: at which the true accept rate is reported; None leaves verification out.
        expansion: query expansion; None is none.
        re_ranking: None is none.
        backend: of neighbour searches, see ``nearest_neighbours``.
        memory_budget_mb: MiB of distances held at once.

    Raises:
        ConfigError: a value that does not exist, or parts that do not go together.
    """

    metric: str = "cosine"
    rule: str = "market1501"
    trapezoid: bool = False
    repeats: int = 10
    seed: int = 0
    ranks: tuple[int, ...] = (1, 5, 10)
    resamples: int = 1000
    false_accept_rates: tuple[float, ...] | None = None
    expansion: QueryExpansion | None = None
    re_ranking: ReRanking | None = None
    backend: str = "auto"
    memory_budget_mb: float = 256

    def __post_init__(self) -> None:
        check_metric(self.metric)
        check_choice("TEST.PROTOCOL", self.rule, tuple(RULES))
        check_choice("TEST.KNN_BACKEND", self.backend, BACKENDS)
        if not RULES[self.rule].draws_queries:
            return
        parts = {"RERANK": self.re_ranking, "AQE": self.expansion, "ROC": self.false_accept_rates}
        for name, part in parts.items():
            if part is not None:
                raise ConfigError(
                    f"TEST.{name}.ENABLED needs one gallery, and TEST.PROTOCOL {self.rule} draws several.\n"
                    f"  fix: TEST.{name}.ENABLED False, or TEST.PROTOCOL no_camera for query and gallery as they are"
                )
        if self.trapezoid:
            raise ConfigError(
                f"TEST.AP trapezoid is Market-1501's; under TEST.PROTOCOL {self.rule} a query has one match"
            )

    @classmethod
    def from_config(cls, cfg: Any) -> "Protocol":
        """Return the protocol that ``cfg.TEST`` describes.

        Raises:
            ConfigError: parts that do not go together.
        """
        test = cfg.TEST
        expansion = re_ranking = None
        if test.AQE.ENABLED:
            expansion = QueryExpansion(
                k=test.AQE.QE_K, alpha=test.AQE.ALPHA, times=test.AQE.QE_TIME, sides=test.AQE.SIDES
            )
        if test.RERANK.ENABLED:
            keys = test.RERANK
            re_ranking = ReRanking(k1=keys.K1, k2=keys.K2, share=keys.LAMBDA, form=keys.FORM)
        return cls(
            metric=test.METRIC,
            rule=test.PROTOCOL,
            trapezoid=test.AP == "trapezoid",
            repeats=test.REPEATS,
            seed=test.SEED,
            ranks=tuple(sorted({1, 5, 10, *test.RANKS})),
            resamples=test.BOOTSTRAP,
            false_accept_rates=tuple(test.ROC.FAR) if test.ROC.ENABLED else None,
            expansion=expansion,
            re_ranking=re_ranking,
            backend=test.KNN_BACKEND,
            memory_budget_mb=test.MEMORY_BUDGET_MB,
        )

    def plain(self) -> "Protocol":
        """Return the same rule for cosine distances and nothing else, as floors are judged."""
        return replace(self, metric="cosine", resamples=0, false_accept_rates=None, expansion=None, re_ranking=None)

    def metric_names(self) -> list[str]:
        """Return the names of the metrics that features are judged by; see ``Judgement.metrics``."""
        names = [*(f"Rank-{rank}" for rank in self.ranks), "mAP", "mINP", "metric"]
        return names + [accept_rate_name(rate) for rate in self.false_accept_rates or ()]

    @property
    def cross_camera(self) -> bool:
        """Whether images of the query's identity from its own camera are junk."""
        return RULES[self.rule].cross_camera

    @property
    def draws_queries(self) -> bool:
        """Whether query and gallery are drawn from all images, which then are ranked against all."""
        return RULES[self.rule].draws_queries

    def ranker(self, ids: Identities) -> Ranker:
        """Return what ranks under this rule."""
        return RULES[self.rule].build(ids, self)

    def dtype(self, features: torch.dtype) -> torch.dtype:
        """Return the dtype of the distances of features: float64 where those are and nothing else is asked for."""
        if features == torch.float64 and self.expansion is None and self.re_ranking is None:
            return torch.float64
        return torch.float32

    def describe(self, features: torch.dtype = torch.float32) -> str:
        """Return the protocol for features of a dtype in one line."""
        parts = [
            f"{self.metric} distance in {str(self.dtype(features)).removeprefix('torch.')}",
            RULES[self.rule].text.format(self),
            "trapezoid AP" if self.trapezoid else "",
            str(self.expansion or ""),
            str(self.re_ranking or "no re-ranking"),
        ]
        return "; ".join(filter(None, parts))
