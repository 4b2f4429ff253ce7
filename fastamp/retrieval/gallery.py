"""Galleries: images with features that can be searched, in a file of features or in a folder that changes."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fastamp.retrieval.features import Features, ImageColumns, ModelId
from fastamp.retrieval.indices import Index
from fastamp.retrieval.vectors import Vectors
from fastamp.utils.errors import ConfigError


@dataclass(frozen=True)
class Conditions:
    """Conditions on the images that a search compares with.

    Attributes:
        cameras, identities: accepted values. Default: (), all.
        after, before: seconds since 1970-01-01 UTC; ``after`` is inclusive, ``before`` exclusive. An image without a
            time meets neither. Default: None, no limit.
    """

    cameras: Collection[str] = ()
    identities: Collection[str] = ()
    after: float | None = None
    before: float | None = None

    def accept(self, camera: str, identity: str, time: float | None) -> bool:
        """Return True if an image meets all conditions."""
        return (
            (not self.cameras or camera in self.cameras)
            and (not self.identities or identity in self.identities)
            and (self.after is None or (time is not None and time >= self.after))
            and (self.before is None or (time is not None and time < self.before))
        )


class Gallery(Protocol):
    """Store of N images with features, which ``search`` reads: ``FeaturesGallery`` and ``MutableGallery``."""

    @property
    def path(self) -> Path:
        """File or folder."""

    @property
    def model(self) -> ModelId:
        """Model of the features."""

    @property
    def kind(self) -> str:
        """Kind of the search: ``flat``, which is exact, or that of the index."""

    @property
    def recall(self) -> float | None:
        """Measured recall of the search in 0..1, see ``Index.measure``; None if it is exact."""

    @property
    def vectors(self) -> Vectors:
        """Features of all images."""

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Further columns of all images, see ``ImageColumns``."""

    def __len__(self) -> int:
        """Return the number of images."""

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which the gallery does not change, with the changes of other processes."""

    def propose(self, queries: np.ndarray, k: int, effort: int | None) -> np.ndarray | None:
        """Return the rows (Q, C) that an index proposes, see ``Index.propose``; None without an index."""

    def images(self, rows: np.ndarray) -> ImageColumns:
        """Return the columns of images; ``rows`` is an array of indices of any shape."""

    def rows_where(self, conditions: Conditions) -> np.ndarray:
        """Return the rows (M,) int64 of the images that meet all conditions.

        Raises:
            ConfigError: if the gallery has no times, but a limit is given.
        """


class FeaturesGallery:
    """Gallery of features that do not change, in memory or in a file.

    Args:
        features: features of the images.
        index: index of the features. Default: None, the search is exact.
    """

    def __init__(self, features: Features, index: Index | None = None) -> None:
        self.features, self.index = features, index
        self.path, self.model, self.columns = features.path, features.model, features.images.further
        self.vectors = Vectors(features.matrix, features.model.metric, features.path)
        self.kind = "flat" if index is None else index.kind
        self.recall = None if index is None else index.recall

    def __len__(self) -> int:
        return len(self.features)

    def reading(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def propose(self, queries: np.ndarray, k: int, effort: int | None) -> np.ndarray | None:
        """Return the rows that the index proposes; see ``Gallery``."""
        return None if self.index is None else self.index.propose(queries, k, effort)

    def images(self, rows: np.ndarray) -> ImageColumns:
        """Return the columns of images; see ``Gallery``."""
        return self.features.images.take(rows)

    def rows_where(self, conditions: Conditions) -> np.ndarray:
        """Return the rows of the images that meet all conditions; see ``Gallery``."""
        if conditions.after is not None or conditions.before is not None:
            raise ConfigError(
                f"the images of {self.path} have no times, so they cannot be limited by time.\n"
                "  fix: remove the limits, or add the images to a mutable gallery (fastamp gallery add --time)"
            )
        images = self.features.images
        labels = zip(images.camera_names.astype(str).tolist(), images.pids.astype(str).tolist(), strict=True)
        return np.flatnonzero([conditions.accept(camera, identity, None) for camera, identity in labels])
