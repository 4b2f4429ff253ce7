"""Search terms: conditions on the gallery images of a search that a text states, e.g. attributes of a person."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from fastamp.retrieval.gallery import Gallery

if TYPE_CHECKING:
    from fastamp.inference.feature_model import FeatureModel


class SearchTerm(ABC):
    """Condition on the gallery images of a search.

    A plugin names its subclasses in ``SEARCH_TERMS``; each becomes an option of ``fastamp search``.

    Attributes:
        name: name of the term, for the metric of a search without queries.
    """

    name = ""

    @classmethod
    @abstractmethod
    def from_model(cls, text: str, model: "FeatureModel") -> "SearchTerm":
        """Build the term of a search with the features of a model.

        Args:
            text: text of the user.
            model: model of the search.

        Raises:
            ConfigError: if the text is invalid, or the model does not support the term.
        """

    @abstractmethod
    def rows(self, gallery: Gallery) -> np.ndarray:
        """Return the rows (M,) int64 of the gallery images that meet the condition.

        Raises:
            ConfigError: if the gallery lacks the values.
            DataError: if no image meets the condition.
        """

    @abstractmethod
    def scores(self, gallery: Gallery) -> np.ndarray:
        """Return the scores (N,) float64 in 0..1 by which a search without queries ranks the gallery images."""

    def columns(self) -> Collection[str]:
        """Return the columns of the gallery to show in the results. Default: none."""
        return ()
