"""Ranking rules: which gallery images count for each query, and how.

A rule is a class in ``PROTOCOL_REGISTRY``, under its name in ``TEST.PROTOCOL``. The rules of a field are in their own
modules: ``single_shot``, ``cross_modality``, ``cloth_changing``, ``mars``, ``product_retrieval`` and ``animals``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.config.key import Key
from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk, Matches, Pairs
from fastamp.evaluation.rank import RankingResult, query_scores, ranks_of_matches
from fastamp.utils.errors import DataError
from fastamp.utils.missing import MISSING
from fastamp.utils.registry import Registry

KEYS = (
    Key(
        "TEST.PROTOCOL",
        "market1501",
        "Name of a registered protocol: which gallery images count for each query, and how. market1501 excludes "
        "images of the query's identity and camera; no_camera excludes no images; the guide to evaluation lists all.",
    ),
)

PROTOCOL_REGISTRY = Registry("TEST.PROTOCOL")
"""Registry of subclasses of ``RankingRule``."""


class Ranker:
    """Rank the gallery for each query, from blocks of distances that may be added in any order.

    Args:
        identities: identities and cameras of Q queries and G gallery images, as ``RankingRule.arrange`` returns them.
        rule: ranking rule.
        excluded: see ``Matches``. Default: none.

    Attributes:
        num_trials: number of random galleries, R.
        num_gallery: number of gallery images; in one trial, if the gallery is drawn at random.
        num_extra: number of columns of ``RankingResult.extra``, which ``rank`` then returns last. Default: 0.
    """

    num_trials = 1
    num_extra = 0

    def __init__(self, identities: Identities, rule: "RankingRule", *, excluded: np.ndarray | None = None) -> None:
        self.matches, self.trapezoid = rule.matches(identities, excluded), rule.trapezoid
        self.num_gallery = len(self.matches.gallery_pids) - rule.all_images  # without the query itself
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
        distances[pairs.junk_rows, pairs.junk_columns] = torch.nan
        distances[:, self.matches.unmatched] = torch.nan
        return pairs

    def result(self) -> RankingResult:
        """Return the results of all added queries on the CPU, in query order."""
        empty = [np.empty(0), np.empty(0), np.empty((0, self.num_trials), dtype=np.int64)]
        empty += [np.empty((0, self.num_extra))] if self.num_extra else []
        parts = [empty, *(self._parts[start] for start in sorted(self._parts))]
        return RankingResult(*(torch.from_numpy(np.concatenate(columns)) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, kw_only=True)
class RankingRule:
    """Rule that ranks all gallery images except junk: base class of the protocols.

    A subclass sets ``text``, and may set ``junk`` and ``columns``:

    Attributes:
        text: description for the log, with names of fields in braces, e.g. ``{num_trials}``.
        junk: junk rule; None (default) for no junk. ``SAME_CAMERA`` requires camera labels; custom rules may also
            require them.
        columns: names of the columns of the test set that the rule needs. Default: none.
        draws: which images the rule draws at random: ``"query"``, ``"gallery"``. Default: none.
        all_images: True if each image, query or gallery, is a query against all images. Default: False.
        open_set: True if queries without a match are expected, and the rule predicts which they are. Default: False.
        closed_set: True if the identities of the gallery are meant to be in the training set. Default: False.
        trapezoid: if True, compute AP as in the original Market-1501 evaluation code: the area under the
            precision-recall curve by the trapezoidal rule, without gallery images of identity -1. Default: False, the
            mean precision at the matches.
    """

    text: ClassVar[str]
    draws: ClassVar[tuple[str, ...]] = ()
    all_images: ClassVar[bool] = False
    open_set: ClassVar[bool] = False
    closed_set: ClassVar[bool] = False

    trapezoid: bool = False

    @property
    def junk(self) -> Junk | None:
        """Junk rule."""
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the rule needs."""
        return ()

    @property
    def name(self) -> str:
        """Value of ``TEST.PROTOCOL``; the name of the class if it is not registered."""
        named = (name for name in PROTOCOL_REGISTRY if PROTOCOL_REGISTRY.get(name) is type(self))
        return next(named, type(self).__name__)

    @property
    def uses_cameras(self) -> bool:
        """True if junk is defined by cameras, so that camera labels are required."""
        return self.junk is not None and self.junk.uses_cameras

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Read the arguments from the config.

        Raises:
            ConfigError: if a value is invalid.
        """
        return {"trapezoid": cfg.TEST.AP_METHOD == "trapezoid"}

    def describe(self) -> str:
        """Describe the rule for the log."""
        return self.text.format(**vars(self))

    def column_fix(self, column: str) -> str:
        """Return the fix if one of ``columns`` is missing: a change of the config."""
        return "change TEST.PROTOCOL"

    def check(self, identities: Identities) -> None:
        """Check the labels of a test set that has all columns. Default: all labels are valid.

        Raises:
            DataError: if the rule cannot rank these images.
        """

    def arrange(self, identities: Identities) -> Identities:
        """Return the identities of the queries and the gallery that the rule ranks, given those of the test set."""
        return identities.all_images() if self.all_images else identities

    def images_with_query(self, identities: Identities) -> torch.Tensor:
        """Select the images of identities that have a query, which excludes distractors.

        Returns:
            (Q + G,) bool, queries first.
        """
        pids = torch.cat((identities.query_pids, identities.gallery_pids)).cpu()
        return torch.isin(pids, identities.query_pids.cpu()) & (pids >= 0)

    def matches(self, identities: Identities, excluded: np.ndarray | None = None) -> Matches:
        """Find the matches and junk of images that ``arrange`` returned; for ``excluded``, see ``Matches``."""
        unmatched = MISSING if self.trapezoid else None
        return Matches(identities, junk=self.junk, unmatched_pid=unmatched, excluded=excluded)

    def ranker(self, identities: Identities, metric: str) -> Ranker:
        """Build the ranker of images that ``arrange`` returned, given the metric of their distances."""
        return Ranker(identities, self)

    def metric_names(self, ranks: Sequence[int]) -> list[str]:
        """List the names of the metrics in percent that ``metrics`` can return."""
        return [*(f"Rank-{rank}" for rank in ranks), "mAP", "mINP", "metric"]

    def metrics(self, ranking: RankingResult, ranks: Sequence[int], every: RankingResult) -> dict[str, Any]:
        """Compute the metrics of some queries.

        Args:
            ranking: results of these queries.
            ranks: ranks of the CMC, including 1.
            every: results of all queries.

        Returns:
            Name -> value in percent, as float; without CMC and mAP if no query has a match. ``not_defined`` lists other
            metrics that are not defined.
        """
        if not ranking.num_valid:
            return {}
        metrics = {f"Rank-{rank}": 100 * ranking.cmc(rank) for rank in ranks}
        metrics |= {"mAP": 100 * ranking.mean_ap, "mINP": 100 * ranking.mean_inp}
        return metrics | {"metric": (metrics["mAP"] + metrics["Rank-1"]) / 2}

    def counts(self, ranking: RankingResult) -> dict[str, int]:
        """Count the queries, and those without a match."""
        return {"num_query": len(ranking.ap), "num_query_without_match": len(ranking.ap) - ranking.num_valid}

    def for_baselines(self) -> "RankingRule":
        """Return the rule for features of another model, without values that are valid for one model only."""
        return self


@PROTOCOL_REGISTRY.register("market1501")
class Market1501(RankingRule):
    """Rule of Market-1501 (Zheng et al. 2015)."""

    text = "Market-1501 (images of the query's identity and camera are junk)"
    junk = SAME_CAMERA


@PROTOCOL_REGISTRY.register("no_camera")
class NoCamera(RankingRule):
    """Rule without cameras."""

    text = "no cameras (no junk)"


@dataclass(frozen=True, kw_only=True)
class RandomRule(RankingRule):
    """Rule that draws images at random in each of several trials.

    Attributes:
        num_trials: number of trials. Default: 10.
        seed: seed of the random images. Default: 0.
    """

    num_trials: int = 10
    seed: int = 0

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Read the arguments from the config."""
        return super().from_config(cfg) | {"num_trials": cfg.TEST.NUM_TRIALS, "seed": cfg.TEST.SEED}


def rank_distances(distances: torch.Tensor, identities: Identities, *, trapezoid: bool = False) -> RankingResult:
    """Rank the gallery for each query by precomputed distances, under the Market-1501 rule.

    Gallery images of the query's identity from the query's camera are junk, which is excluded (Zheng et al. 2015). Ties
    are broken by gallery order, so that the result is deterministic.

    Args:
        distances: (Q, G), any numeric dtype.
        identities: identities and cameras of the Q queries and G gallery images.
        trapezoid: if True, compute trapezoidal AP, see ``RankingRule``. Default: False.

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
    ranker = Ranker(identities, Market1501(trapezoid=trapezoid))
    exact = distances.dtype if distances.dtype in (torch.float32, torch.float64) else torch.float64
    ranker.add(0, distances.to(exact, copy=True))
    return ranker.result()
