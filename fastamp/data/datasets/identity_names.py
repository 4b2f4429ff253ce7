"""Rules for names of identities, for all readers: which names are missing values, and which are equal.

- Unknown: ``-1`` and other negative numbers, ``?``, and in any case ``nan``, ``none``, ``null``, ``na``, ``n/a`` and
  ``unknown``. Images of these identities are excluded and counted, because they would become one identity; except if
  all training images are unknown, for training without labels.
- Equal: whole numbers of the same value, such as ``0007``, ``7`` and ``7.0``, which programs write for each other.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)

_UNKNOWN = frozenset(("nan", "-nan", "none", "null", "na", "n/a", "#n/a", "<na>", "unknown", "?"))
_NEGATIVE = re.compile(r"-(inf|[0-9]+\.?[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+)")
_WHOLE_NUMBER = re.compile(r"[+-]?0*([0-9]+)(\.0*)?")
_JUNK = "-1"
_MAX_LISTED = 5


@lru_cache(maxsize=2**16)
def is_unknown_identity(name: str) -> bool:
    """Return True if the name of an identity is a missing value; see the module."""
    text = name.strip().lower()
    return text in _UNKNOWN or (_NEGATIVE.fullmatch(text) is not None and float(text) < 0)


def merge_equal_names(names: Iterable[str], title: str, kind: str = "identity") -> dict[str, str]:
    """Map each name to the first one that is equal to it, and warn if there are several of one identity.

    Args:
        names: distinct names; the parts of a name between slashes are compared separately.
        title: file or dataset, for the warning.
        kind: what is named, for the warning. Default "identity".
    """
    first: dict[str, str] = {}
    merged = {name: first.setdefault("/".join(map(_number, name.split("/"))), name) for name in names}
    pairs = [f"{other} and {name}" for name, other in merged.items() if name != other]
    if pairs:
        logger.warning(
            "%s: names of equal numbers are one %s: %s%s\n  fix: write one of them; or, if they differ, add a letter",
            title,
            kind,
            ", ".join(pairs[:_MAX_LISTED]),
            f" and {len(pairs) - _MAX_LISTED} more" * (len(pairs) > _MAX_LISTED),
        )
    return merged


def log_excluded(counts: Mapping[str, int], title: str) -> str:
    """Log and return how many images of unknown identities were excluded; "" if there are none.

    Args:
        counts: name -> number of images. Names other than -1 are logged as a warning.
        title: file or dataset.
    """
    if not counts:
        return ""
    names = ", ".join(f"{name} ({count})" for name, count in Counter(counts).most_common(_MAX_LISTED))
    more = f" and {len(counts) - _MAX_LISTED} more" * (len(counts) > _MAX_LISTED)
    note = f"excluded {plural(sum(counts.values()), 'image')} of unknown identities: {names}{more}"
    if {*counts} == {_JUNK}:
        logger.info("%s: %s", title, note)
    else:
        logger.warning("%s: %s\n  fix: if this is the name of an identity, rename it", title, note)
    return note


def _number(text: str) -> str:
    """Return a whole number without zeros at its ends, and any other text unchanged."""
    match = _WHOLE_NUMBER.fullmatch(text)
    return match[1] if match else text
