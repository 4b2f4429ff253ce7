"""Search of images by attributes, e.g. ``red`` or ``upper_color=red, hat=cap``."""

import re
from collections.abc import Mapping, Sequence

from fastamp.utils.errors import ConfigError, did_you_mean


def parse_query(text: str, names: Sequence[str]) -> list[list[str]]:
    """Find the attributes that a query means.

    Args:
        text: terms separated by commas. A term is the name of an attribute, the words of a name in any order, as in
            ``red upper_color``, or the value of a text column, as in ``red``, which may belong to several columns.
        names: names of the attributes of the model.

    Returns:
        For each term the attributes that it may mean.

    Raises:
        ConfigError: if a term matches no attribute, or there are no terms.
    """
    terms = [term.strip() for term in text.split(",") if term.strip()]
    if not terms:
        raise ConfigError(f"the query has no attributes.\n  available: {', '.join(names)}")
    return [_matching(term, names) for term in terms]


def _matching(term: str, names: Sequence[str]) -> list[str]:
    exact = [name for name in names if name.lower() == term.lower()]
    words = set(re.split(r"[\s=]+", term.lower()))
    found = exact or [name for name in names if words <= {*re.split(r"[=]+", name.lower()), name.lower()}]
    if not found:
        raise ConfigError(f"no attribute matches {term!r}.{did_you_mean(term, names)}\n  available: {', '.join(names)}")
    return found


def score(probabilities: Mapping[str, float], query: Sequence[Sequence[str]]) -> float:
    """Compute the score of an image: the product over the terms of the largest probability of their attributes.

    Args:
        probabilities: see ``Predictor.attributes``.
        query: see ``parse_query``.
    """
    product = 1.0
    for names in query:
        product *= max(probabilities[name] for name in names)
    return product
