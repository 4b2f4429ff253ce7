"""Evaluation protocols: rules that select the gallery images for each query, and other evaluation settings.

``RULES`` maps each value of ``TEST.PROTOCOL`` to its rule. The rule's ``Junk`` defines which gallery images are
excluded for a query; ``Matches`` applies this definition to ranking, verification, sampled pairs and reports.
Under every rule, trapezoidal AP and sampled pairs also exclude gallery images of identity -1
(``Matches.unmatched``). Rules with a randomly drawn gallery are in ``single_shot``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fastamp.config.key import Key
from fastamp.evaluation.neighbors import BACKENDS
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rank import RankingResult, query_scores, ranks_of_matches
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, DataError, check_choice, did_you_mean
from fastamp.utils.moved import moved_names, renamed_arguments, renamed_attribute

KEYS = (
    Key(
        "TEST.PROTOCOL",
        "market1501",
        "Rule that selects the gallery images for each query: market1501 excludes images of the query's identity and "
        "camera; no_camera excludes no images; cuhk03 excludes the same images as market1501, but computes CMC over "
        "one random gallery image per identity; vehicleid draws one gallery image per identity from all images and "
        "uses the remaining images as queries; animals_closed, animals_open and animals_disjoint predict the identity "
        "of each query from the nearest image of its species.",
        choices=(
            "market1501",
            "no_camera",
            "cuhk03",
            "vehicleid",
            "animals_closed",
            "animals_open",
            "animals_disjoint",
            "animals_disjoint_miewid",
        ),
    ),
)

CAMERA = "camera"
"""Name of the camera as a column, e.g. for ``TEST.GROUP_BY``."""

Rows = torch.Tensor | np.ndarray | slice

# Identity that the original Market-1501 evaluation code excludes from the gallery.
JUNK_PID = -1
# Maximum number of pairs in memory, about 60 bytes each.
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
    """Identities, cameras and further columns of Q query and G gallery images.

    Attributes:
        query_pids, query_camids: (Q,) int64.
        gallery_pids, gallery_camids: (G,) int64.
        columns: column name -> (query values (Q,), gallery values (G,)), of any dtype. Default: no columns.
        column_names: column name -> text of each number in a text column. Default: no texts.
    """

    query_pids: torch.Tensor
    gallery_pids: torch.Tensor
    query_camids: torch.Tensor
    gallery_camids: torch.Tensor
    columns: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    column_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def all_images(self) -> "Identities":
        """Return the identities and columns of a test in which all images are both queries and gallery."""
        pids = torch.cat((self.query_pids, self.gallery_pids))
        camids = torch.cat((self.query_camids, self.gallery_camids))
        columns = {name: (torch.cat(both),) * 2 for name, both in self.columns.items()}
        return Identities(pids, pids, camids, camids, columns, self.column_names)

    def select(self, queries: Rows, gallery: Rows) -> "Identities":
        """Return the identities and columns of some query and gallery images.

        Args:
            queries, gallery: indices, a mask or a slice.

        Returns:
            The selected rows, on the CPU.
        """
        return Identities(
            self.query_pids.cpu()[queries],
            self.gallery_pids.cpu()[gallery],
            self.query_camids.cpu()[queries],
            self.gallery_camids.cpu()[gallery],
            {name: (query.cpu()[queries], other.cpu()[gallery]) for name, (query, other) in self.columns.items()},
            self.column_names,
        )

    def query_texts(self, column: str) -> np.ndarray:
        """Return the values of a column, or of ``"camera"``, as text for each query: (Q,) str; "missing" if unknown."""
        values = (self.query_camids if column == CAMERA else self.columns[column][0]).cpu()
        names = self.column_names.get(column, ())
        distinct, numbers = values.unique(return_inverse=True)
        texts = np.array([_value_text(value, names) for value in distinct.tolist()], dtype=str)
        chosen: np.ndarray = texts[numbers.numpy()]
        return chosen


def _value_text(value: float, names: Sequence[str]) -> str:
    """Return the text of a column's value: its name in a text column; "missing" for NaN, and -1 in a text column."""
    if value != value or (names and not 0 <= value < len(names)):
        return "missing"
    return names[int(value)] if names else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Pairs:
    """Matches and junk of B consecutive queries, as int64 indices into their (B, G) distances, sorted by row."""

    rows: np.ndarray
    columns: np.ndarray
    junk_rows: np.ndarray
    junk_columns: np.ndarray


class GalleryGroups:
    """Gallery images grouped by identity.

    Attributes:
        order: (G,) int64, gallery indices in a stable sort by identity.
        pids: (P,) int64, identities in the gallery, ascending.
        starts: (P,) int64, offset of each identity in ``order``.
        counts: (P,) int64, number of images of each identity.
    """

    def __init__(self, gallery_pids: np.ndarray) -> None:
        self.order = np.argsort(gallery_pids, kind="stable")
        self.pids, self.starts, self.counts = np.unique(gallery_pids[self.order], return_index=True, return_counts=True)

    def find(self, pids: np.ndarray) -> np.ndarray:
        """Return the indices in ``self.pids`` of B identities, (B,) int64; -1 for identities not in the gallery."""
        positions = np.searchsorted(self.pids, pids).clip(max=len(self.pids) - 1)
        return np.where(self.pids[positions] == pids, positions, -1)


@dataclass(frozen=True)
class Junk:
    """Rule that defines the junk of a query: gallery images that count neither as matches nor as negatives.

    Attributes:
        test: function (``Matches``, query indices, gallery indices) -> bool array, True for junk. The index arrays are
            int64 and broadcast against each other.
        same_identity_only: if True (default), only images of the query's identity are tested and can be junk.
        uses_cameras: False if the test needs no camera labels. Default: True.
    """

    test: Callable[["Matches", np.ndarray, np.ndarray], np.ndarray]
    same_identity_only: bool = True
    uses_cameras: bool = True


def junk_from_cross_camera(cross_camera: bool) -> "Junk | None":
    """Convert the deprecated argument ``cross_camera`` to ``junk``."""
    return SAME_CAMERA if cross_camera else None


class Matches:
    """Matches and junk of each query.

    A gallery image of the query's identity is a match unless it is junk.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        junk: junk rule; None for no junk.
        unmatched_pid: identity whose images never match, e.g. ``JUNK_PID``. Default: None.

    Attributes:
        query_pids, query_camids: (Q,) int64.
        gallery_pids, gallery_camids: (G,) int64.
        query_columns: column name -> (Q,) values; see ``Identities.columns``.
        gallery_columns: column name -> (G,) values.
        unmatched: (U,) int64, gallery indices of the images with ``unmatched_pid``.
    """

    @renamed_arguments(ids="identities", cross_camera=("junk", junk_from_cross_camera))
    def __init__(self, identities: Identities, *, junk: Junk | None, unmatched_pid: int | None = None) -> None:
        self.query_pids, self.gallery_pids = identities.query_pids.cpu().numpy(), identities.gallery_pids.cpu().numpy()
        self.query_camids = identities.query_camids.cpu().numpy()
        self.gallery_camids = identities.gallery_camids.cpu().numpy()
        self.query_columns = {name: both[0].cpu().numpy() for name, both in identities.columns.items()}
        self.gallery_columns = {name: both[1].cpu().numpy() for name, both in identities.columns.items()}
        self.junk, self.unmatched_pid = junk, unmatched_pid
        self.groups = GalleryGroups(self.gallery_pids)
        self.unmatched = np.flatnonzero(self.gallery_pids == unmatched_pid)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split the queries ``start:stop`` into non-empty ranges, each with a bounded number of pairs."""
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
        """Return the matches and junk of the queries ``start:stop``."""
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
    """Return True for each pair of a query and a gallery image from the same camera; see ``Junk.test``."""
    same: np.ndarray = matches.query_camids[queries] == matches.gallery_camids[gallery]
    return same


SAME_CAMERA = Junk(same_camera)
"""Images of the query's identity and camera (Zheng et al. 2015, "Scalable person re-identification: a benchmark")."""


class Ranker:
    """Rank the gallery for each query, from blocks of distances that may be added in any order.

    Args:
        identities: identities and cameras of Q queries and G gallery images.
        junk: junk rule; None for no junk. Default: ``SAME_CAMERA``, the rule of Market-1501.
        trapezoid: if True, compute AP as in the original Market-1501 evaluation code: the area under the
            precision-recall curve by the trapezoidal rule, without gallery images of identity -1. Default: False, the
            mean precision at the matches.

    Attributes:
        num_trials: number of random galleries, R.
        num_extra: number of columns of ``RankingResult.extra``, which ``rank`` then returns last. Default: 0.
    """

    num_trials = 1
    num_extra = 0
    draws = renamed_attribute("draws", "num_trials")

    @renamed_arguments(ids="identities", cross_camera=("junk", junk_from_cross_camera))
    def __init__(self, identities: Identities, *, junk: Junk | None = SAME_CAMERA, trapezoid: bool = False) -> None:
        unmatched = JUNK_PID if trapezoid else None
        self.matches = Matches(identities, junk=junk, unmatched_pid=unmatched)
        self.trapezoid = trapezoid
        self._parts: dict[int, tuple[np.ndarray, ...]] = {}

    @renamed_arguments(block="distances")
    def add(self, start: int, distances: torch.Tensor) -> None:
        """Rank the gallery for queries ``start:start + B``, given (B, G) distances; those of junk become NaN."""
        for first, last in self.matches.spans(start, start + len(distances)):
            self._parts[first] = self.rank(first, distances[first - start : last - start])

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Return ``(AP, INP, rank of the first match)`` for queries ``start:start + B``: (B,), (B,) and (B, R)."""
        pairs = self.matches.pairs(start, start + len(distances))
        # Comparisons with NaN are False, so NaN excludes an image from all counts.
        junk = (torch.from_numpy(side).to(distances.device) for side in (pairs.junk_rows, pairs.junk_columns))
        distances[tuple(junk)] = torch.nan
        if len(self.matches.unmatched):
            distances[:, torch.from_numpy(self.matches.unmatched).to(distances.device)] = torch.nan
        ranks = ranks_of_matches(distances, pairs.rows, pairs.columns)
        ap, inp, first_match = query_scores(ranks, pairs.rows, len(distances), trapezoid=self.trapezoid)
        return ap, inp, first_match[:, None]

    @property
    def num_gallery(self) -> int:
        """Number of gallery images; in one trial, if the gallery is drawn at random."""
        return len(self.matches.gallery_pids)

    def result(self) -> RankingResult:
        """Return the results of all added queries on the CPU, in query order."""
        empty = [np.empty(0), np.empty(0), np.empty((0, self.num_trials), dtype=np.int64)]
        empty += [np.empty((0, self.num_extra))] if self.num_extra else []
        parts = [empty, *(self._parts[start] for start in sorted(self._parts))]
        return RankingResult(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))


def build_ranker(identities: Identities, protocol: "Protocol") -> Ranker:
    """Build a ``Ranker``, which ranks all gallery images."""
    return Ranker(identities, junk=protocol.junk, trapezoid=protocol.trapezoid)


@renamed_arguments(cross_camera=("junk", junk_from_cross_camera), draws_queries="random_query_gallery_split")
@dataclass(frozen=True, kw_only=True)
class RankingRule:
    """Rule that selects queries and gallery images.

    Attributes:
        text: description for the log: a format string whose argument 0 is the protocol, e.g. ``{0.num_trials}``.
        junk: junk rule; None for no junk. ``SAME_CAMERA`` requires camera labels; custom rules may also require them.
        build: function (identities, protocol) -> ranker. Default: ``build_ranker``.
        random_query_gallery_split: if True, queries and gallery are drawn at random from all images, so distances
            between all images are required. Default: False.
        columns: names of the columns that the rule needs in ``Identities.columns``. Default: none.
        open_set: if True, queries without a match are expected, and the rule predicts which they are. Default: False.
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
    open_set: bool = False
    configure: Callable[[Any], "RankingRule"] | None = None
    further_metrics: Callable[[RankingResult, RankingResult], dict[str, Any]] | None = None
    further_names: tuple[str, ...] = ()
    is_calibrated: bool = False
    draws_queries = renamed_attribute("draws_queries", "random_query_gallery_split")


RULES: dict[str, RankingRule] = {
    "market1501": RankingRule(
        text="Market-1501 (images of the query's identity and camera are junk)", junk=SAME_CAMERA
    ),
    "no_camera": RankingRule(text="no cameras (no junk)", junk=None),
}
"""Rule for each value of ``TEST.PROTOCOL``; ``single_shot`` adds the rules with a random gallery.

``choices`` in ``KEYS`` repeats the names, because the config is read without importing this module.
"""


def accept_rate_name(rate: float) -> str:
    """Return the metric name of the true accept rate at the false accept rate ``rate``, e.g. ``TAR@FAR=0.001``."""
    return f"TAR@FAR={rate:.10g}"


@renamed_arguments(repeats="num_trials")
@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of an evaluation.

    Attributes:
        metric: ``"cosine"`` (default) or ``"euclidean"``.
        rule: key of ``RULES``: ``"market1501"`` (default), ``"no_camera"``, ``"cuhk03"``, ``"vehicleid"``, or a custom
            one.
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
    repeats = renamed_attribute("repeats", "num_trials")
    draws_queries = renamed_attribute("draws_queries", "random_query_gallery_split")

    def __post_init__(self) -> None:
        check_metric(self.metric)
        check_choice("TEST.PROTOCOL", self.rule, tuple(RULES))
        check_choice("TEST.KNN_BACKEND", self.backend, BACKENDS)
        if not self.ranking_rule.random_query_gallery_split:
            return
        parts = {"RERANK": self.re_ranking, "AQE": self.expansion, "ROC": self.false_accept_rates}
        for name, part in parts.items():
            if part is not None:
                raise ConfigError(
                    f"TEST.{name}.ENABLED=True requires a fixed gallery, but TEST.PROTOCOL={self.rule} "
                    f"{'uses all images as queries' if self.ranking_rule.further_metrics else 'draws random galleries'}"
                    ".\n"
                    f"  fix: set TEST.{name}.ENABLED False, or TEST.PROTOCOL no_camera to use the fixed gallery"
                )
        if self.trapezoid:
            raise ConfigError(
                f"TEST.AP_METHOD=trapezoid is not supported with TEST.PROTOCOL={self.rule}, because each query has "
                "only one match.\n  fix: set TEST.AP_METHOD to standard"
            )

    @classmethod
    def from_config(cls, cfg: Any) -> "Protocol":
        """Build the protocol from ``cfg.TEST``.

        Raises:
            ConfigError: if a value is invalid, or settings are incompatible.
        """
        test = cfg.TEST
        check_choice("TEST.PROTOCOL", test.PROTOCOL, tuple(RULES))
        configure = RULES[test.PROTOCOL].configure
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
        names += self.ranking_rule.further_names
        return names + [accept_rate_name(rate) for rate in self.false_accept_rates or ()]

    @property
    def ranking_rule(self) -> RankingRule:
        """Rule that selects queries and gallery images."""
        if self.configured_rule is not None:
            return self.configured_rule
        return RULES[self.rule]

    @property
    def is_open_set(self) -> bool:
        """True if queries without a match are expected."""
        return self.ranking_rule.open_set

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
        for name, needed_by in self.columns.items():
            if name not in names:
                raise DataError(
                    f"{needed_by} needs the column {name!r}, which the test set does not have."
                    f"{did_you_mean(name, names)}\n"
                    f"  available columns: {', '.join(names) or 'none'}\n"
                    f"  fix: add the column to the test set, or change {needed_by.split('=')[0]}"
                )

    @property
    def cross_camera(self) -> bool:
        """True if the rule excludes junk by cameras, so that camera labels are required."""
        return self.junk is not None and self.junk.uses_cameras

    @property
    def random_query_gallery_split(self) -> bool:
        """True if queries and gallery are drawn at random from all images."""
        return self.ranking_rule.random_query_gallery_split

    @renamed_arguments(ids="identities")
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
