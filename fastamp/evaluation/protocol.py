"""Protocols: which gallery images count for which query, and all that an evaluation is configured by.

``RULES`` maps each ``TEST.PROTOCOL`` to its rule. A rule's ``Junk`` is the one place that says which gallery images are
excluded for a query; ``Matches`` applies it, for the ranking, verification, the sample of pairs and the report alike.
Apart from the rule, gallery images of identity -1 are excluded for all queries under trapezoid AP and in the sample of
pairs (``Matches.unmatched``). Rules that draw a gallery are in ``single_shot``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastamp.config.key import Key
from fastamp.evaluation.neighbors import BACKENDS
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rank import RankingResult, query_scores, ranks_of_matches
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, check_choice
from fastamp.utils.moved import moved_names, renamed_arguments, renamed_attribute

KEYS = (
    Key(
        "TEST.PROTOCOL",
        "market1501",
        "What counts as a match: market1501 leaves out images of the query's identity from its own camera; no_camera "
        "leaves out nothing; cuhk03 is market1501 with the CMC over one drawn gallery image of each identity; "
        "vehicleid draws one gallery image of each identity from all images, and the others are the queries.",
        choices=("market1501", "no_camera", "cuhk03", "vehicleid"),
    ),
)

# The identity that the first Market-1501 evaluation code excludes from the gallery.
JUNK_PID = -1
# Pairs that are held at once, in some 60 bytes each.
_MAX_PAIRS = 2**19

__getattr__ = moved_names(
    __name__,
    {
        "Rule": "fastamp.evaluation.protocol.RankingRule",
        "check_sets": "fastamp.evaluation.metrics.check_features",
    },
)


@dataclass(frozen=True)
class Identities:
    """Identities and cameras of the query and gallery images: (Q,), (G,), (Q,), (G,) int64."""

    query_pids: torch.Tensor
    gallery_pids: torch.Tensor
    query_camids: torch.Tensor
    gallery_camids: torch.Tensor

    def all_images(self) -> "Identities":
        """Return the queries and the gallery together as both sides."""
        pids = torch.cat((self.query_pids, self.gallery_pids))
        camids = torch.cat((self.query_camids, self.gallery_camids))
        return Identities(pids, pids, camids, camids)


@dataclass(frozen=True)
class Pairs:
    """Matches and junk of B queries in a row, as the entries of their (B, G) distances: int64, sorted by row."""

    rows: np.ndarray
    columns: np.ndarray
    junk_rows: np.ndarray
    junk_columns: np.ndarray


class GalleryGroups:
    """The gallery images of each identity.

    Attributes:
        order: (G,) int64, the gallery images sorted by identity, those of one in the gallery's order.
        pids: (P,) int64, the gallery's identities, ascending.
        starts: (P,) int64, where an identity's images begin in ``order``.
        counts: (P,) int64, how many it has.
    """

    def __init__(self, gallery_pids: np.ndarray) -> None:
        self.order = np.argsort(gallery_pids, kind="stable")
        self.pids, self.starts, self.counts = np.unique(gallery_pids[self.order], return_index=True, return_counts=True)

    def find(self, pids: np.ndarray) -> np.ndarray:
        """Return the group of each of (B,) identities, -1 where the gallery has none."""
        positions = np.searchsorted(self.pids, pids).clip(max=len(self.pids) - 1)
        return np.where(self.pids[positions] == pids, positions, -1)


@dataclass(frozen=True)
class Junk:
    """Which gallery images are excluded for a query: neither matches, nor images of others.

    Attributes:
        test: takes ``Matches`` and the int64 numbers of queries and of gallery images, two arrays that broadcast;
            returns for each pair whether it is junk, bool.
        same_identity_only: whether images of the query's identity alone can be junk; others then are not tested.
    """

    test: Callable[["Matches", np.ndarray, np.ndarray], np.ndarray]
    same_identity_only: bool = True


def junk_from_cross_camera(cross_camera: bool) -> "Junk | None":
    """Return the junk of the old argument ``cross_camera``."""
    return SAME_CAMERA if cross_camera else None


class Matches:
    """The matches and the junk of queries.

    A gallery image of the query's identity is a match, unless it is junk.

    Args:
        identities: of Q queries and G gallery images.
        junk: the rule's; None is no junk.
        unmatched_pid: an identity that matches nothing; None is none.

    Attributes:
        query_pids, query_camids: (Q,) int64.
        gallery_pids, gallery_camids: (G,) int64.
        unmatched: (U,) int64, the gallery images of ``unmatched_pid``.
    """

    @renamed_arguments(ids="identities", cross_camera=("junk", junk_from_cross_camera))
    def __init__(self, identities: Identities, *, junk: Junk | None, unmatched_pid: int | None = None) -> None:
        self.query_pids, self.gallery_pids = identities.query_pids.cpu().numpy(), identities.gallery_pids.cpu().numpy()
        self.query_camids = identities.query_camids.cpu().numpy()
        self.gallery_camids = identities.gallery_camids.cpu().numpy()
        self.junk, self.unmatched_pid = junk, unmatched_pid
        self.groups = GalleryGroups(self.gallery_pids)
        self.unmatched = np.flatnonzero(self.gallery_pids == unmatched_pid)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the queries from ``start`` to ``stop`` whose pairs take little memory, one query at least."""
        group = self.groups.find(self.query_pids[start:stop])
        pairs = np.where(group >= 0, self.groups.counts[group], 0)
        if self._tests_all_images:
            pairs = np.full_like(pairs, len(self.gallery_pids))
        pairs = np.cumsum(pairs)
        first = 0
        while first < len(group):
            done = pairs[first - 1] if first else 0
            last = max(first + 1, int(np.searchsorted(pairs, done + _MAX_PAIRS, side="right")))
            yield start + first, start + last
            first = last

    def pairs(self, start: int, stop: int) -> Pairs:
        """Return the pairs of the queries from ``start`` up to, not including, ``stop``."""
        pids = self.query_pids[start:stop]
        group = np.where(pids == self.unmatched_pid, -1, self.groups.find(pids))
        counts = np.where(group >= 0, self.groups.counts[group], 0)
        rows = np.repeat(np.arange(len(group)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = self.groups.order[self.groups.starts[group[rows]] + within]
        if self.junk is None:
            return Pairs(rows, columns, rows[:0], columns[:0])
        junk = self.junk.test(self, start + rows, columns)
        junk_rows, junk_columns = rows[junk], columns[junk]
        if self._tests_all_images:
            shape = len(group), len(self.gallery_pids)
            queries, gallery = np.arange(start, start + shape[0])[:, None], np.arange(shape[1])
            junk_rows, junk_columns = np.broadcast_to(self.junk.test(self, queries, gallery), shape).nonzero()
        return Pairs(rows[~junk], columns[~junk], junk_rows, junk_columns)

    @property
    def _tests_all_images(self) -> bool:
        return self.junk is not None and not self.junk.same_identity_only


def same_camera(matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """Return whether a gallery image is from the query's camera, for each pair; see ``Junk``."""
    return matches.query_camids[queries] == matches.gallery_camids[gallery]


SAME_CAMERA = Junk(same_camera)
"""Images of the query's identity from its own camera (Zheng et al. 2015, "Scalable person re-identification")."""


class Ranker:
    """Ranks the queries of one block of distances after the other, in any order.

    Args:
        identities: of Q queries and G gallery images.
        junk: the rule's; None is no junk. Default: Market-1501's.
        trapezoid: the AP of the first Market-1501 evaluation code: the area under the precision-recall curve by the
            trapezoidal rule, gallery images of identity -1 excluded. Without, the mean of the precisions at the
            matches, as everybody reports it today.

    Attributes:
        num_trials: draws of the gallery, R.
    """

    num_trials = 1
    draws = renamed_attribute("draws", "num_trials")

    @renamed_arguments(ids="identities", cross_camera=("junk", junk_from_cross_camera))
    def __init__(self, identities: Identities, *, junk: Junk | None = SAME_CAMERA, trapezoid: bool = False) -> None:
        unmatched = JUNK_PID if trapezoid else None
        self.matches = Matches(identities, junk=junk, unmatched_pid=unmatched)
        self.trapezoid = trapezoid
        self._parts: dict[int, tuple[np.ndarray, ...]] = {}

    @renamed_arguments(block="distances")
    def add(self, start: int, distances: torch.Tensor) -> None:
        """Rank the gallery for the queries from ``start`` on by (B, G) distances; the junk's are overwritten."""
        for first, last in self.matches.spans(start, start + len(distances)):
            self._parts[first] = self.rank(first, distances[first - start : last - start])

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Return the (B,) AP, (B,) INP and (B, R) first match of the queries from ``start`` on."""
        pairs = self.matches.pairs(start, start + len(distances))
        # NaN is neither closer nor farther than anything.
        junk = (torch.from_numpy(side).to(distances.device) for side in (pairs.junk_rows, pairs.junk_columns))
        distances[tuple(junk)] = torch.nan
        if len(self.matches.unmatched):
            distances[:, torch.from_numpy(self.matches.unmatched).to(distances.device)] = torch.nan
        ranks = ranks_of_matches(distances, pairs.rows, pairs.columns)
        ap, inp, first_match = query_scores(ranks, pairs.rows, len(distances), trapezoid=self.trapezoid)
        return ap, inp, first_match[:, None]

    def result(self) -> RankingResult:
        """Return the results of the queries seen, on the CPU, in their order."""
        empty = np.empty(0), np.empty(0), np.empty((0, self.num_trials), dtype=np.int64)
        parts = [empty, *(self._parts[start] for start in sorted(self._parts))]
        return RankingResult(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))


def build_ranker(identities: Identities, protocol: "Protocol") -> Ranker:
    """Return the ranker of all gallery images under a protocol."""
    return Ranker(identities, junk=protocol.junk, trapezoid=protocol.trapezoid)


@renamed_arguments(cross_camera=("junk", junk_from_cross_camera), draws_queries="random_query_gallery_split")
@dataclass(frozen=True, kw_only=True)
class RankingRule:
    """Which queries are ranked against which gallery images.

    Attributes:
        text: the rule in words, with the protocol's ``num_trials`` and ``seed``.
        junk: which gallery images are excluded for a query; None is none, and cameras are not needed.
        build: returns its ranker, of ``protocol.junk``. Default: a ``Ranker``.
        random_query_gallery_split: whether query and gallery are drawn from all images, which then are ranked against
            all.
    """

    text: str
    junk: Junk | None
    build: Callable[[Identities, "Protocol"], Ranker] = build_ranker
    random_query_gallery_split: bool = False
    draws_queries = renamed_attribute("draws_queries", "random_query_gallery_split")


RULES = {
    "market1501": RankingRule(
        text="Market-1501 (images of the query's identity from its own camera are junk)", junk=SAME_CAMERA
    ),
    "no_camera": RankingRule(text="no cameras (no junk)", junk=None),
}
"""``TEST.PROTOCOL`` -> its rule; ``single_shot`` adds those that draw a gallery.

The names stand in the ``choices`` of ``KEYS`` above, too: the config is read without importing this module.
"""


def accept_rate_name(rate: float) -> str:
    """Return the name of the true accept rate at a false accept rate in 0..1."""
    return f"TAR@FAR={rate:.10g}"


@renamed_arguments(repeats="num_trials")
@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How features are evaluated.

    Attributes:
        metric: ``"cosine"`` or ``"euclidean"``.
        rule: ``"market1501"``, ``"no_camera"``, ``"cuhk03"``, ``"vehicleid"``, or another name in ``RULES``.
        trapezoid: see ``Ranker``.
        num_trials: draws of a gallery, under a rule that draws.
        seed: of these draws, and of the bootstrap's.
        ranks: ranks of the CMC that are reported.
        resamples: of the queries, for the 95 % intervals of mAP and Rank-1; 0 leaves them out.
        false_accept_rates: at which the true accept rate is reported; None leaves verification out.
        expansion: query expansion; None is none.
        re_ranking: None is none.
        backend: of neighbour searches, see ``nearest_neighbors``.
        memory_budget_mb: MiB of distances held at once.

    Raises:
        ConfigError: a value that does not exist, or parts that do not go together.
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
    repeats = renamed_attribute("repeats", "num_trials")
    draws_queries = renamed_attribute("draws_queries", "random_query_gallery_split")

    def __post_init__(self) -> None:
        check_metric(self.metric)
        check_choice("TEST.PROTOCOL", self.rule, tuple(RULES))
        check_choice("TEST.KNN_BACKEND", self.backend, BACKENDS)
        if not RULES[self.rule].random_query_gallery_split:
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
                f"TEST.AP_METHOD trapezoid is Market-1501's; under TEST.PROTOCOL {self.rule} a query has one match"
            )

    @classmethod
    def from_config(cls, cfg: Any) -> "Protocol":
        """Return the protocol that ``cfg.TEST`` describes.

        Raises:
            ConfigError: parts that do not go together.
        """
        test = cfg.TEST
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
        )

    def plain(self) -> "Protocol":
        """Return the same rule for cosine distances and nothing else, as for baselines."""
        return replace(self, metric="cosine", resamples=0, false_accept_rates=None, expansion=None, re_ranking=None)

    def metric_names(self) -> list[str]:
        """Return the names of the metrics in percent, by which models can be compared before there are any results.

        ``EvaluationResult.metrics`` computes them.
        """
        names = [*(f"Rank-{rank}" for rank in self.ranks), "mAP", "mINP", "metric"]
        return names + [accept_rate_name(rate) for rate in self.false_accept_rates or ()]

    @property
    def junk(self) -> Junk | None:
        """Which gallery images are excluded for a query; None is none."""
        return RULES[self.rule].junk

    @property
    def cross_camera(self) -> bool:
        """Whether the rule has junk, for which it needs cameras."""
        return self.junk is not None

    @property
    def random_query_gallery_split(self) -> bool:
        """Whether query and gallery are drawn from all images, which then are ranked against all."""
        return RULES[self.rule].random_query_gallery_split

    @renamed_arguments(ids="identities")
    def ranker(self, identities: Identities) -> Ranker:
        """Return the ranker of this rule."""
        return RULES[self.rule].build(identities, self)

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
