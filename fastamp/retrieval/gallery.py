"""Galleries: images with features that can be searched, in a file of features or in a folder that changes."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.indices import Index
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.vectors import Vectors
from fastamp.utils.errors import DataError


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

    def __bool__(self) -> bool:
        """Return True if there is a condition."""
        return bool(self.cameras or self.identities) or self.after is not None or self.before is not None

    def accept(self, camera: str, identity: str, time: float | None) -> bool:
        """Return True if an image meets all conditions."""
        return (
            (not self.cameras or camera in self.cameras)
            and (not self.identities or identity in self.identities)
            and (self.after is None or (time is not None and time >= self.after))
            and (self.before is None or (time is not None and time < self.before))
        )


class Gallery(ABC):
    """N images with features, which ``search`` reads.

    Attributes:
        path: file or folder.
        model: model of the features.
        fingerprint: text that states which features of which model these are; an index file with another one is not
            used.
        index: index of the features; None if the search is exact.
    """

    path: Path
    model: ModelId
    fingerprint: str
    index: Index | None

    @property
    def kind(self) -> str:
        """Kind of the search: ``flat``, which is exact, or that of the index."""
        return "flat" if self.index is None else self.index.kind

    @property
    def recall(self) -> float | None:
        """Measured recall of the search in 0..1, see ``Index.measure``; None if it is exact."""
        return None if self.index is None else self.index.recall

    def check_model(self, model: Any) -> None:
        """Check that features of a model (``ModelId`` or ``FeatureModel``) can be compared with those of the gallery.

        Raises:
            DataError: if the hashes of the models differ.
        """
        if model.config_hash != self.model.config_hash:
            raise DataError(
                f"model mismatch: the features in {self.path} were extracted with a different model.\n"
                f"  file:  {self.model.checkpoint} ({self.model.config_hash})\n"
                f"  model: {model.checkpoint} ({model.config_hash})\n"
                "  fix: use the model that extracted the features, or extract them again with this model"
            )

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which the gallery does not change, with the changes of other processes."""
        return nullcontext()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @property
    @abstractmethod
    def vectors(self) -> Vectors:
        """Features of all images."""

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        """Further columns of all images, see ``ImageColumns``."""
        return self.columns_of(slice(None)).further

    @abstractmethod
    def columns_of(self, rows: np.ndarray | slice) -> ImageColumns:
        """Return the columns of images; ``rows`` is an array of indices of any shape, or a slice."""

    @abstractmethod
    def rows_where(self, conditions: Conditions) -> np.ndarray:
        """Return the rows (M,) int64 of the images that meet all conditions.

        Raises:
            ConfigError: if the gallery has no times, but a limit is given.
        """
