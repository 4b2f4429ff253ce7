"""Missing identities, cameras, tracklets and values of columns."""

import numpy as np

MISSING = -1
"""Number of a missing identity or camera, and of a missing value in a column of integers, or of texts with numbers."""


def is_missing(values: np.ndarray) -> np.ndarray:
    """Return True for each missing value: NaN, ``MISSING`` among integers, "" among texts."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    return np.asarray(values == ("" if values.dtype.kind == "U" else MISSING))
