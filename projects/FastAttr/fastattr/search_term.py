"""Search of images by attributes, e.g. ``red`` or ``upper_color=red, hat=cap``."""

import re
from collections.abc import Collection, Sequence

import numpy as np

from fastamp.inference.feature_model import FeatureModel
from fastamp.inference.search_terms import SearchTerm
from fastamp.retrieval.columns import VALUE_PREFIX
from fastamp.retrieval.gallery import Gallery
from fastamp.utils.errors import ConfigError, DataError, did_you_mean
from fastattr.output import AttributeProbabilities


class AttributeTerm(SearchTerm):
    """Images with attributes, e.g. ``"red upper, hat"``: words of the names of attributes, separated by commas.

    Args:
        text: see ``parse_query``.
        names: names of the attributes of the model.
        threshold: probability in 0..1 from which an attribute is predicted, ``TEST.THRES``.

    Raises:
        ConfigError: see ``parse_query``.
    """

    name = "attributes"

    def __init__(self, text: str, names: Sequence[str], threshold: float) -> None:
        self.text, self.threshold = text, threshold
        self.query = parse_query(text, names)

    @classmethod
    def from_model(cls, text: str, model: FeatureModel) -> "AttributeTerm":
        """Build the term with the attributes of the model."""
        output = model.require_output("attributes")
        assert isinstance(output, AttributeProbabilities)
        return cls(text, output.names, output.threshold)

    def rows(self, gallery: Gallery) -> np.ndarray:
        """Return the images for each term of which the probability of an attribute is at least the threshold."""
        rows = np.flatnonzero((self._probabilities(gallery) >= self.threshold).all(axis=0))
        if not len(rows):
            raise DataError(
                f"none of the {len(gallery)} gallery images has the attributes {self.text!r} with a probability of at "
                f"least {self.threshold:g}.\n  fix: name fewer attributes, or decrease TEST.THRES"
            )
        return rows

    def scores(self, gallery: Gallery) -> np.ndarray:
        """Return the products over the terms of the largest probability of their attributes."""
        return self._probabilities(gallery).prod(axis=0, dtype=np.float64)

    def columns(self) -> Collection[str]:
        """Return the columns with the probabilities of the attributes."""
        return {VALUE_PREFIX + name for names in self.query for name in names}

    def _probabilities(self, gallery: Gallery) -> np.ndarray:
        """Return the largest probability of the attributes of each term, (T, N) float.

        Raises:
            ConfigError: if the gallery lacks an attribute.
            DataError: if a column is not (N,) float.
        """
        columns = {name: gallery.columns.get(VALUE_PREFIX + name) for names in self.query for name in names}
        for name, values in columns.items():
            if values is None:
                raise ConfigError(
                    f"{gallery.path} has no probabilities of the attribute {name!r}.\n"
                    "  fix: extract the features again with the model of this search, or search without --attributes"
                )
            if values.ndim != 1 or values.dtype.kind != "f":
                raise DataError(
                    f"{gallery.path}: expected the probabilities of {name!r} to be numbers (N,), got {values.dtype} "
                    f"{values.shape}.\n  fix: extract the features again"
                )
        return np.stack([np.max([columns[name] for name in names], axis=0) for names in self.query])


def parse_query(text: str, names: Sequence[str]) -> list[list[str]]:
    """Find the attributes that a query means.

    Args:
        text: terms separated by commas. A term is the name of an attribute, or words of a name in any order, as in
            ``red upper``, ``red upper_color`` or ``red``, which may belong to several attributes.
        names: names of the attributes of the model.

    Returns:
        For each term the attributes that it may mean.

    Raises:
        ConfigError: if a term matches no attribute, or there are no terms.
    """
    terms = [term.strip() for term in text.split(",") if term.strip()]
    if not terms:
        raise ConfigError(
            f"the query has no attributes.\n  available: {', '.join(names)}\n  fix: name at least one attribute"
        )
    return [_matching(term, names) for term in terms]


def _matching(term: str, names: Sequence[str]) -> list[str]:
    exact = [name for name in names if name.lower() == term.lower()]
    words = _words(term)
    matching = exact or [name for name in names if words <= _words(name)]
    if not matching:
        raise ConfigError(
            f"no attribute matches {term!r}.{did_you_mean(term, names)}\n  available: {', '.join(names)}\n"
            "  fix: use words of these names, and a comma between attributes"
        )
    return matching


def _words(text: str) -> set[str]:
    return set(re.split(r"[\s=_]+", text.lower())) - {""}
