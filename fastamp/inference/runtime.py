"""Features of the ONNX, OpenVINO and TFLite files of `fastamp export`, with the preprocessing in their metadata."""

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastamp.data.decode import BIT_DEPTH, LARGEST_PIXELS
from fastamp.data.transforms import Resize, Transforms
from fastamp.evaluation.calibration import read_calibration
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY
from fastamp.inference.exported_metadata import read_metadata, unusable
from fastamp.inference.feature_model import FeatureModel
from fastamp.inference.images import Boxes, Image, has_pixels, list_or_crop
from fastamp.inference.sessions import Session, open_onnx, open_openvino, open_tflite
from fastamp.utils.errors import ConfigError, DataError, WeightsError, optional_package
from fastamp.utils.files import check_not_device, expand

logger = logging.getLogger(__name__)

# Larger batches do not fit the cache: 32 images of 256 x 128 took 2 % longer at once, and one by one 15 to 40 % longer
# (OSNet x0.25, ONNX Runtime and OpenVINO, one thread).
_BATCH = 8


class ExportedModel(FeatureModel):
    """Exported model, run by ONNX Runtime, OpenVINO or LiteRT on the CPU, with the methods of ``FeatureModel``.

    Args:
        path: ONNX file (.onnx), OpenVINO file (.xml, with its .bin file) or TFLite file (.tflite) of `fastamp export`,
            which contains the preprocessing.
        threads: number of threads of the runtime. Default: None, the cores that are available to this process.

    Attributes:
        checkpoint: the file.
        metadata: metadata of the file.

    Raises:
        ConfigError: if the suffix is unknown, the runtime is not installed, or the model requires cameras, views or a
            modality.
        WeightsError: if the file cannot be read, or was not written by `fastamp export`.
    """

    batch_size = _BATCH

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        self.checkpoint = expand(path)
        self._threads = threads
        self._session = _open(self.checkpoint, threads)
        self.metadata = read_metadata(self._session.metadata, self.checkpoint)
        others = [name for name in self._session.inputs if name != "images"]
        if others:
            raise ConfigError(
                f"{self.checkpoint} requires {' and '.join(others)} for each image, which is not supported here.\n"
                "  fix: use the checkpoint, or a model without camera, view or modality inputs"
            )
        self._is_preprocessed = self.metadata.get("preprocess") != "inside"
        # With preprocessing inside, the file crops. Resizing images that already have the size does not change them.
        size, crop = self.metadata["resize"], self.metadata["center_crop"] if self._is_preprocessed else None
        crop = None if crop is None else (crop[0], crop[1])
        self.transforms = Transforms(
            channels=self.metadata["channels"],
            max_pixels=LARGEST_PIXELS,
            bit_depth=self.metadata.get("bit_depth", BIT_DEPTH),
            resize=Resize(size=tuple(size), crop=crop, interpolation=self.metadata["interpolation"]),
            size_key="INPUT.SIZE_TEST",
            reduced=self.metadata.get("decode_reduced", False),
        )
        self.metric = self.metadata["metric"]
        self.stored_calibration = read_calibration(self.metadata, self.checkpoint)
        mean, std = (
            np.array(self.metadata[name], dtype=np.float32).reshape(-1, 1, 1) for name in ("pixel_mean", "pixel_std")
        )
        self._normalization = (mean, std) if self.metadata["normalization"] == "outside" else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: a copy, e.g. in another process, opens the file again."""
        return partial(type(self), threads=self._threads), (os.path.abspath(self.checkpoint),)

    def __repr__(self) -> str:
        return f"ExportedModel({str(self.checkpoint)!r})"

    @property
    def config_hash(self) -> str:
        """Hash of the checkpoint; another one if Euclidean distances differ because of features of unit length."""
        value: str = self.metadata["config_hash"]
        return f"{value}-l2" if self.metadata["l2"] and self.metric == "euclidean" else value

    @property
    def protocol(self) -> Protocol:
        """Evaluation protocol of the checkpoint; market1501 if the file does not name it."""
        rule = PROTOCOL_REGISTRY.get(self.metadata.get("protocol", "market1501"))
        return Protocol(metric=self.metric, rule=rule())

    @property
    def feature_dim(self) -> int:
        """Dimension D of the features."""
        return int(self.metadata["feature_width"])

    def features(
        self,
        images: Image | Sequence[Image],
        *,
        boxes: Boxes | None = None,
        color: str = "rgb",
        **labels: Any,
    ) -> Tensor:
        """Extract the features of images, or of boxes in one frame; those of images without pixels are NaN.

        Args:
            images, boxes, color: see ``Predictor.features``.
            labels: cameras, views and modalities, which must be None, because the model does not take them.

        Returns:
            (N, D) float32 on the CPU, as exported.

        Raises:
            DataError, ConfigError: see ``Predictor.features``.
        """
        given = [name for name, value in labels.items() if value is not None]
        if given:
            raise ConfigError(
                f"{self.checkpoint} does not take {' and '.join(given)}.\n  fix: omit it, or use the checkpoint"
            )
        contents, color = list_or_crop(images, boxes, color, self.transforms)
        # Reversing the channels of a batch is faster than of crops, whose memory is not contiguous.
        later = color == "bgr" and self.transforms.channels == 3 and all(map(_is_color_array, contents))
        color = "rgb" if later else color
        features = np.full((len(contents), self.feature_dim), np.nan, np.float32)
        kept = [row for row, image in enumerate(contents) if has_pixels(image)]
        for start in range(0, len(kept), _BATCH):
            rows = kept[start : start + _BATCH]
            features[rows] = self._compute([self._load(contents[row], color) for row in rows], reverse=later)
        return torch.from_numpy(features)

    def features_of_preprocessed(self, images: Sequence[Tensor]) -> Tensor:
        """Extract the features (N, D) float32 of images (C, H, W) uint8 from ``preprocess``."""
        batches = (images[start : start + _BATCH] for start in range(0, len(images), _BATCH))
        return torch.from_numpy(np.concatenate([*map(self._compute, batches)]))

    def _compute(self, images: Sequence[Tensor], *, reverse: bool = False) -> NDArray[np.float32]:
        """Compute the features of resized images (C, H, W) uint8, whose channels are in ``reverse`` order."""
        if len({image.shape for image in images}) > 1:  # to be cropped by the file
            return np.concatenate([self._compute([image], reverse=reverse) for image in images])
        if not self._is_preprocessed:
            reverse ^= self.metadata["color_order"] == "BGR"
        order = -1 if reverse else 1
        batch = np.empty((len(images), *images[0].shape), np.float32 if self._is_preprocessed else np.uint8)
        # One pass in NumPy: between the other work of a tracker, each operator of PyTorch took 20 to 50 us more.
        for image, values in zip(images, batch, strict=True):
            if self._normalization is None:
                values[:] = image.numpy()[::order]
            else:
                np.subtract(image.numpy()[::order], self._normalization[0], out=values)
                values /= self._normalization[1]
        if not self._is_preprocessed:
            batch = np.ascontiguousarray(batch.transpose(0, 2, 3, 1))
        try:
            features = self._session.run({"images": batch})
        except Exception as error:  # exceptions of a runtime have no common base class
            cause = f"cannot compute images of shape {batch.shape} ({type(error).__name__}: {error!s:.300})"
            raise unusable(self.checkpoint, cause) from error
        shape = len(batch), self.feature_dim
        if features.shape != shape or features.dtype != np.float32:
            found = f"computes {features.dtype} {features.shape}"
            raise unusable(self.checkpoint, f"{found}; expected float32 features of shape {shape}")
        if not np.isfinite(features).all():
            raise DataError(
                f"{self.checkpoint} computes features that are not finite.\n"
                "  fix: export the model with --precision float32"
            )
        return features


def _is_color_array(image: Any) -> bool:
    return isinstance(image, np.ndarray) and image.shape[2:] == (3,)


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Return True if a file name has a suffix of the exported files that ``ExportedModel`` runs."""
    return Path(path).suffix in _RUNTIMES


def _open(path: Path, threads: int | None) -> Session:
    """Load a file in its runtime."""
    if not is_exported(path):
        raise ConfigError(
            f"{path} cannot be run.\n  fix: export the model to a file that ends in {', '.join(_RUNTIMES)}"
        )
    if not path.exists():
        raise WeightsError(f"{path} not found.\n  fix: correct the path")
    title, package, extra, open_session = _RUNTIMES[path.suffix]
    with optional_package(f"{path} requires {package}", extra):
        importlib.import_module(package)
    try:
        check_not_device(path)
        return open_session(path, threads=threads)
    except Exception as error:  # exceptions of a runtime have no common base class
        raise unusable(path, f"cannot be read as {title}: {type(error).__name__}") from error


_RUNTIMES: dict[str, tuple[str, str, str, Callable[..., Session]]] = {
    ".onnx": ("ONNX", "onnxruntime", "export", open_onnx),
    ".xml": ("OpenVINO", "openvino", "openvino", open_openvino),
    ".tflite": ("TFLite", "ai_edge_litert", "tflite", open_tflite),
}
"""Suffix -> title, package, extra of fastamp that installs it, and function that opens a file."""
