"""Protocols of animal re-identification: closed, open and disjoint sets, with a prediction for each query.

The prediction is the identity of the nearest image of the database, or *new* if its similarity is below a threshold.
The database of a query is the gallery of its own species. There are no cameras. BAKS, BAUS and the AUC are those of
``identification``; the threshold is chosen on identities that are neither in the training set nor in the test.

- animals_closed: the identities of all queries are in the database.
- animals_open: some queries are of animals that are not in the database, and are called *new*.
- animals_disjoint: each image of the test set is a query against all others, as for a population without a catalog.
- animals_disjoint_miewid: the same, but an image without another of its identity counts as wrong, as in MiewID's
  program; animals_disjoint excludes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.config.key import Key
from fastamp.evaluation.animal_identification import AnimalRanker, identification_metrics, num_validation
from fastamp.evaluation.identities import Identities, Junk, Matches, same_image
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, RankingRule
from fastamp.utils.errors import ConfigError, DataError

KEYS = (
    Key(
        "TEST.ANIMALS.DATABASE",
        "species",
        "Protocols of animals: column whose value a gallery image shares with the queries that search it, e.g. species "
        "or the name of the source. If empty, all queries search the whole gallery.",
    ),
    Key(
        "TEST.ANIMALS.VALIDATION",
        "validation",
        "animals_open: column that is 1 for the query and gallery images of identities that are held out to choose the "
        "threshold for new animals, and 0 for the images of the test; `fastamp split --validation` writes it.",
    ),
    Key(
        "TEST.ANIMALS.THRESHOLD",
        None,
        "animals_open: similarity of the nearest image (cosine, or minus the Euclidean distance) below which a query "
        "is new. Default: chosen on the validation identities.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class AnimalRule(RankingRule):
    """Rule under which the identity of the nearest image of the database is predicted: base class.

    Attributes:
        database: column that a query and the images that it searches share; "" for no such column. Default: species.
        validation: column that is 1 for images of validation identities, which test queries do not search; "" (default)
            for none.
        identifies: if False, only CMC, mAP and mINP are computed. Default: True.
        missing_is_wrong: see ``AnimalRanker``. Default: False.
    """

    missing_is_wrong: ClassVar[bool] = False

    database: str = "species"
    validation: str = ""
    identifies: bool = True

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Read the arguments from the config."""
        return super().from_config(cfg) | {"database": cfg.TEST.ANIMALS.DATABASE}

    def describe(self) -> str:
        """Describe the rule for the log."""
        return super().describe() + (f", each against its own {self.database}" if self.database else "")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the database and of the validation identities."""
        return tuple(filter(None, (self.database, self.validation)))

    def column_fix(self, column: str) -> str:
        """Return the fix if the column is missing."""
        if column == self.validation:
            return "set TEST.ANIMALS.THRESHOLD to a similarity"
        return "change TEST.ANIMALS.DATABASE (empty: the whole gallery)"

    def check(self, identities: Identities) -> None:
        """Check that the column of the validation identities marks images.

        Raises:
            DataError: if it has texts, or numbers other than 0 and 1; missing values are allowed.
        """
        if not self.validation:
            return
        values = torch.cat(identities.columns[self.validation]).unique().tolist()
        names = identities.column_names.get(self.validation) or ()
        wrong = names[:5] or [value for value in values if value == value and value not in (-1, 0, 1)][:5]
        if wrong:
            raise DataError(
                f"the column {self.validation!r} of TEST.ANIMALS.VALIDATION must be 1 for the images that are held out "
                f"for validation, and 0 for the others; got {', '.join(map(str, wrong))}.\n"
                "  fix: choose another column, write it with fastamp split --validation, or set TEST.ANIMALS.THRESHOLD"
            )

    @property
    def junk(self) -> Junk | None:
        """Images that a query does not search: those of other databases, and the query itself."""
        if not (self.columns or self.all_images):
            return None
        return Junk(self._is_not_searched, same_identity_only=not self.columns, uses_cameras=False)

    def _is_not_searched(self, matches: Matches, queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
        junk = np.zeros(np.broadcast_shapes(queries.shape, gallery.shape), dtype=bool)
        if self.all_images:
            junk |= same_image(matches, queries, gallery)
        if self.database:
            junk |= matches.query_columns[self.database][queries] != matches.gallery_columns[self.database][gallery]
        if self.validation:
            is_test = matches.query_columns[self.validation][queries] < 1
            junk |= is_test & (matches.gallery_columns[self.validation][gallery] > 0)
        return junk

    def ranker(self, identities: Identities, metric: str) -> AnimalRanker:
        """Build the ranker."""
        return AnimalRanker(
            identities, self, metric=metric, validation=self.validation, missing_is_wrong=self.missing_is_wrong
        )

    def metric_names(self, ranks: Sequence[int]) -> list[str]:
        """List the names of the metrics."""
        return [*super().metric_names(ranks), "BAKS"]

    def metrics(self, ranking: RankingResult, ranks: Sequence[int], every: RankingResult) -> dict[str, Any]:
        """Compute the metrics; see ``RankingRule.metrics`` and ``identification_metrics``."""
        metrics = super().metrics(ranking, ranks, every)
        return metrics | self.identify(ranking, every) if self.identifies else metrics

    def identify(self, ranking: RankingResult, every: RankingResult) -> dict[str, Any]:
        """Compute the metrics of the predictions."""
        return identification_metrics(ranking, every, threshold=None, has_new=False)

    def counts(self, ranking: RankingResult) -> dict[str, int]:
        """Count the queries of the test."""
        held_out = num_validation(ranking)
        return {name: count - held_out for name, count in super().counts(ranking).items()}


@PROTOCOL_REGISTRY.register("animals_closed")
class AnimalsClosed(AnimalRule):
    """Closed set."""

    text = "closed set of animals"
    closed_set = True


@PROTOCOL_REGISTRY.register("animals_open")
@dataclass(frozen=True, kw_only=True)
class AnimalsOpen(AnimalRule):
    """Open set, in which a query without a similar image is *new*.

    Attributes:
        validation: see ``AnimalRule``; not needed with a threshold. Default: validation.
        threshold: similarity below which a query is new. Default: None, chosen on the validation identities.
    """

    text = "open set of animals (new if no image is similar)"
    open_set = True
    closed_set = True

    validation: str = "validation"
    threshold: float | None = None

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Read the arguments from the config."""
        threshold = cfg.TEST.ANIMALS.THRESHOLD
        if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
            raise ConfigError(
                f"TEST.ANIMALS.THRESHOLD is {threshold!r}; expected a number.\n"
                "  fix: set a similarity, or null to choose it on the validation set"
            )
        validation = cfg.TEST.ANIMALS.VALIDATION if threshold is None else ""
        return super().from_config(cfg) | {"validation": validation, "threshold": threshold}

    def metric_names(self, ranks: Sequence[int]) -> list[str]:
        """List the names of the metrics."""
        return [*super().metric_names(ranks), "BAUS", "BAKS-BAUS", "AUC-new"]

    def identify(self, ranking: RankingResult, every: RankingResult) -> dict[str, Any]:
        """Compute the metrics of the predictions."""
        return identification_metrics(ranking, every, threshold=self.threshold, has_new=True)

    def for_baselines(self) -> RankingRule:
        """Return a rule without predictions, if the threshold is that of a model."""
        return self if self.threshold is None else replace(self, identifies=False)


@PROTOCOL_REGISTRY.register("animals_disjoint")
class AnimalsDisjoint(AnimalRule):
    """Each image of the test set is a query against all others."""

    text = "animals, leave-one-out"
    all_images = True
    open_set = True


@PROTOCOL_REGISTRY.register("animals_disjoint_miewid")
class AnimalsDisjointMiewid(AnimalsDisjoint):
    """Leave-one-out in which an image without another of its identity counts as wrong."""

    text = "animals, leave-one-out, images without a match are wrong, as in MiewID"
    missing_is_wrong = True
