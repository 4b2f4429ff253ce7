"""Ranking rules: which gallery images count for each query, and how.

A rule is a class in ``PROTOCOL_REGISTRY``, under its name in ``TEST.PROTOCOL``. The rules of a field are in their own
modules: ``single_shot``, ``cross_modality``, ``cloth_changing``, ``mars``, ``product_retrieval`` and ``animals``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from fastamp.config import CfgNode
from fastamp.config.key import Key
from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.ranker import Ranker
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


@dataclass(frozen=True, kw_only=True)
class RankingRule:
    """Rule that ranks all gallery images except junk: base class of the protocols.

    A subclass sets ``text``, and may set ``junk`` and ``columns``:

    Attributes:
        text: description for the log, with names of attributes in braces, e.g. ``{num_trials}``.
        junk: junk rule; None (default) for no junk. ``SAME_CAMERA`` requires camera labels; custom rules may also
            require them.
        columns: names of the columns of the test set that the rule needs. Default: none.
        draws: which images the rule draws at random: ``"query"``, ``"gallery"``. Default: none.
        all_images: True if each image, query or gallery, is a query against all images. Default: False.
        open_set: True if queries without a match are expected, and the rule predicts which they are. Default: False.
        closed_set: True if the identities of the gallery are meant to be in the training set. Default: False.
        trapezoid: if True, compute trapezoidal AP, see ``Ranker``. Default: False.
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
        return self.text.format(**{field.name: getattr(self, field.name) for field in fields(self)})

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

    def ranker(self, identities: Identities, metric: str) -> Ranker:
        """Build the ranker of images that ``arrange`` returned, given the metric of their distances."""
        return Ranker(identities, junk=self.junk, trapezoid=self.trapezoid)

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
