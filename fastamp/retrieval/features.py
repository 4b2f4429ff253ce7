"""Features of images, with the columns that describe the images and the model that computed the features."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.gallery import Conditions, Gallery
from fastamp.retrieval.indices import Index
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.vectors import Vectors
from fastamp.utils.errors import ConfigError


@dataclass(frozen=True)
class Features(Gallery):
    """Features of N images, which do not change.

    Attributes:
        path: file of the features, or folder of the images.
        matrix: (N, D) float32, not normalized; memory-mapped if it is in a file.
        images: columns of the images.
        model: model of the features.
        fingerprint: checksums of the features, paths, further columns and model; "" if they are not in a file.
        index: index of the features. Default: None, the search is exact.
    """

    path: Path
    matrix: np.ndarray
    images: ImageColumns
    model: ModelId
    fingerprint: str = ""
    index: Index | None = None

    def __len__(self) -> int:
        return len(self.matrix)

    @cached_property
    def vectors(self) -> Vectors:
        """Features of all images; their norms are computed once."""
        return Vectors(self.matrix, self.model.metric, self.path)

    def columns_of(self, rows: np.ndarray | slice) -> ImageColumns:
        """Return the columns of images; see ``Gallery``."""
        return self.images.take(rows)

    def rows_where(self, conditions: Conditions) -> np.ndarray:
        """Return the rows of the images that meet all conditions; see ``Gallery``."""
        if conditions.after is not None or conditions.before is not None:
            raise ConfigError(
                f"the images of {self.path} have no times, so they cannot be limited by time.\n"
                "  fix: remove the limits, or add the images to a mutable gallery (fastamp gallery add --time)"
            )
        images = self.images
        labels = zip(images.camera_names.astype(str).tolist(), images.pids.astype(str).tolist(), strict=True)
        return np.flatnonzero([conditions.accept(camera, identity, None) for camera, identity in labels])
