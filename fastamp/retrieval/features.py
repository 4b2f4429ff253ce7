"""Features of images, with the columns that describe the images and the model that computed the features."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastamp.utils.errors import DataError


@dataclass(frozen=True)
class ModelId:
    """The model of features, which decides whether they can be compared.

    Attributes:
        width: dimension D of the features.
        metric: ``"cosine"``, for which features are normalized before they are compared, or ``"euclidean"``.
        config_hash: hash of the model, see ``Predictor.config_hash``.
        checkpoint: path of the model's checkpoint.
    """

    width: int
    metric: str
    config_hash: str
    checkpoint: str


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
            is -1, NaN or "". Models with attributes add their probabilities, ``probability.NAME`` -> (N,) float32.
    """

    paths: np.ndarray
    pids: np.ndarray
    camids: np.ndarray
    split: np.ndarray | None = None
    boxes: np.ndarray | None = None
    cameras: np.ndarray | None = None
    further: Mapping[str, np.ndarray] = field(default_factory=dict)

    def take(self, rows: np.ndarray | int) -> "ImageColumns":
        """Return the columns of ``rows``, an index or an array of indices of any shape."""
        own: dict[str, Any] = {name: getattr(self, name) for name in OWN_COLUMNS}
        own = {name: None if values is None else values[rows] for name, values in own.items()}
        return ImageColumns(**own, further={name: values[rows] for name, values in self.further.items()})

    @property
    def camera_names(self) -> np.ndarray:
        """``cameras``, or ``camids`` if the cameras have no names."""
        return self.camids if self.cameras is None else self.cameras


OWN_COLUMNS = tuple(column.name for column in fields(ImageColumns) if column.name != "further")
"""Names of the columns that every gallery may have, and of their arrays in a file of features."""


@dataclass(frozen=True)
class Features:
    """Features of N images.

    Attributes:
        path: file of the features, or folder of the images.
        matrix: (N, D) float32, not normalized; memory-mapped if it is in a file.
        images: columns of the images.
        model: model of the features.
        fingerprint: checksum of the features, the paths and the further columns; "" if they are not in a file.
    """

    path: Path
    matrix: np.ndarray
    images: ImageColumns
    model: ModelId
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.matrix)


def check_same_model(path: object, stored: ModelId, config_hash: str, checkpoint: object) -> None:
    """Check that the features of a model can be compared with stored ones.

    Args:
        path: file or folder of the stored features, for the message.
        stored: their model.
        config_hash, checkpoint: hash and file of the model.

    Raises:
        DataError: if the hashes differ.
    """
    if config_hash != stored.config_hash:
        raise DataError(
            f"model mismatch: the features in {path} were extracted with a different model.\n"
            f"  file:  {stored.checkpoint} ({stored.config_hash})\n"
            f"  model: {checkpoint} ({config_hash})\n"
            "  fix: use the model that extracted the features, or extract them again with this model"
        )


def is_unknown(labels: np.ndarray) -> bool:
    """Return True if the identities or cameras of all images are unknown, i.e. -1."""
    return labels.dtype.kind in "iu" and bool((labels == -1).all())


def has_missing_integers(column: np.ndarray) -> bool:
    """Return True if -1 is a missing value in a further column: its values are integers, the lowest is -1."""
    return column.dtype.kind in "iu" and len(column) > 0 and int(column.min()) == -1


def normalized(features: np.ndarray, metric: str) -> np.ndarray:
    """Return features (N, D) as they are compared: of length 1 for ``cosine``, unchanged for ``euclidean``."""
    if metric != "cosine":
        return features
    unit: np.ndarray = torch.nn.functional.normalize(torch.from_numpy(features), dim=1).numpy()
    return unit
