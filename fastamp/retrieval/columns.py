"""Columns that describe the images of features."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from fastamp.utils.missing import MISSING, is_missing

VALUE_PREFIX = "probability."
"""Prefix of the columns with the values of a model's outputs, e.g. ``probability.hat``; see ``PredictorOutput``."""


@dataclass(frozen=True, kw_only=True)
class ImageColumns:
    """Columns that describe images: N images of a gallery, or (Q, k) images that a search found.

    Attributes:
        paths: (N,) str, paths of the image files.
        pids: (N,) int64 or str, identities as named in the dataset; -1 if unknown.
        camids: (N,) int64, cameras; -1 if unknown.
        split: (N,) str, ``query``, ``gallery`` or ``train``; None without splits.
        boxes: (N, 4) int64, box of each image in its file: left, top, right, bottom (right and bottom exclusive);
            None if each image is an entire file.
        cameras: (N,) str, cameras as named in the dataset; None if they have no names besides ``camids``.
        further: further columns of the dataset: name -> (N,) int64, float64 or str, or (N, L) numbers. A missing value
            is -1, NaN or "". The outputs of a model add their values, ``probability.NAME`` -> (N,) float32.
    """

    paths: np.ndarray
    pids: np.ndarray
    camids: np.ndarray
    split: np.ndarray | None = None
    boxes: np.ndarray | None = None
    cameras: np.ndarray | None = None
    further: Mapping[str, np.ndarray] = field(default_factory=dict)

    def take(self, rows: np.ndarray | slice | int) -> "ImageColumns":
        """Return the columns of ``rows``: an index, a slice, or an array of indices of any shape."""
        own: dict[str, Any] = {name: vars(self)[name] for name in OWN_COLUMNS}
        own = {name: None if values is None else values[rows] for name, values in own.items()}
        return ImageColumns(**own, further={name: values[rows] for name, values in self.further.items()})

    @property
    def camera_names(self) -> np.ndarray:
        """``cameras``, or ``camids`` if the cameras have no names."""
        return self.camids if self.cameras is None else self.cameras


OWN_COLUMNS = tuple(column.name for column in fields(ImageColumns) if column.name != "further")
"""Names of the columns that every gallery may have, and of their arrays in a file of features."""


def is_unknown(labels: np.ndarray) -> bool:
    """Return True if the identities or cameras of all images are unknown, i.e. -1."""
    return labels.dtype.kind in "iu" and bool(is_missing(labels).all())


def has_missing_integers(column: np.ndarray) -> bool:
    """Return True if -1 is a missing value in a further column: its values are integers, the lowest is -1."""
    return column.dtype.kind in "iu" and len(column) > 0 and int(column.min()) == MISSING
