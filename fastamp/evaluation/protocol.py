"""What is measured and how, as one value that a config is read into and a report states in one line."""

from dataclasses import dataclass, replace
from typing import Any

from fastamp.evaluation.matches import Identities
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rank import Ranker
from fastamp.evaluation.rerank import ReRanking
from fastamp.evaluation.single_shot import OneGalleryImageRanker, SingleGalleryShotRanker
from fastamp.utils.errors import ConfigError

_RULES = {
    "market1501": "Market-1501 (images of the query's identity from its own camera are junk)",
    "no_camera": "no cameras (no junk)",
    "cuhk03": "CUHK03 single gallery shot (own camera is junk; CMC over {repeats} draws, seed {seed})",
    "vehicleid": "VehicleID (one gallery image per identity, all others are queries; {repeats} draws, seed {seed})",
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How features are judged; the attributes are the keys below ``TEST`` of the same names.

    Attributes:
        metric: ``"cosine"`` or ``"euclidean"``.
        rule: ``"market1501"``, ``"no_camera"``, ``"cuhk03"`` or ``"vehicleid"``, see ``ranker``.
        trapezoid: see ``Ranker``.
        repeats: draws of a gallery, under a rule that draws.
        seed: of these draws, and of the bootstrap's.
        ranks: ranks of the CMC that are reported, besides 1, 5 and 10.
        resamples: of the queries, for the 95 % intervals of mAP and Rank-1; 0 leaves them out.
        false_accept_rates: at which the true accept rate is reported; none leaves verification out.
        expansion: query expansion; None is none.
        re_ranking: None is none.
        backend: of neighbour searches, see ``nearest_neighbours``.
        memory_budget_mb: MiB of distances held at once.

    Raises:
        ConfigError: parts that do not go together.
    """

    metric: str = "cosine"
    rule: str = "market1501"
    trapezoid: bool = False
    repeats: int = 10
    seed: int = 0
    ranks: tuple[int, ...] = (1, 5, 10)
    resamples: int = 1000
    false_accept_rates: tuple[float, ...] = ()
    expansion: QueryExpansion | None = None
    re_ranking: ReRanking | None = None
    backend: str = "auto"
    memory_budget_mb: float = 256

    def __post_init__(self) -> None:
        if self.rule != "vehicleid":
            return
        parts = {"RERANK": self.re_ranking, "AQE": self.expansion, "ROC": self.false_accept_rates}
        for name, part in parts.items():
            if part:
                raise ConfigError(
                    f"TEST.{name}.ENABLED needs one gallery, and TEST.PROTOCOL vehicleid draws several.\n"
                    f"  fix: TEST.{name}.ENABLED False, or TEST.PROTOCOL no_camera for query and gallery as they are"
                )
        if self.trapezoid:
            raise ConfigError("TEST.AP trapezoid is Market-1501's, and TEST.PROTOCOL vehicleid has one match a query")

    @classmethod
    def from_config(cls, cfg: Any) -> "Protocol":
        """Return the protocol that ``cfg.TEST`` describes."""
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
            false_accept_rates=tuple(test.ROC.FAR) if test.ROC.ENABLED else (),
            expansion=expansion,
            re_ranking=re_ranking,
            backend=test.KNN_BACKEND,
            memory_budget_mb=test.MEMORY_BUDGET_MB,
        )

    def plain(self) -> "Protocol":
        """Return the same rule for cosine distances and nothing else, as floors are judged."""
        return replace(self, metric="cosine", resamples=0, false_accept_rates=(), expansion=None, re_ranking=None)

    @property
    def cross_camera(self) -> bool:
        """Whether images of the query's identity from its own camera are junk."""
        return self.rule in ("market1501", "cuhk03")

    def ranker(self, ids: Identities) -> Ranker:
        """Return what ranks under this rule; under ``"vehicleid"`` of all images against all."""
        if self.rule == "vehicleid":
            return OneGalleryImageRanker(ids, repeats=self.repeats, seed=self.seed)
        if self.rule == "cuhk03":
            return SingleGalleryShotRanker(ids, repeats=self.repeats, seed=self.seed, trapezoid=self.trapezoid)
        return Ranker(ids, cross_camera=self.cross_camera, trapezoid=self.trapezoid)

    def __str__(self) -> str:
        parts = [
            f"{self.metric} distance in float32",
            _RULES[self.rule].format(repeats=self.repeats, seed=self.seed),
            "trapezoid AP" if self.trapezoid else "",
            str(self.expansion) if self.expansion else "",
            str(self.re_ranking) if self.re_ranking else "no re-ranking",
        ]
        return "; ".join(filter(None, parts))
