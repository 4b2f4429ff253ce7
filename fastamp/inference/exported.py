"""Features of an ONNX file of `fastamp export`, computed by ONNX Runtime, with the preprocessing in its metadata."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.data.decode import LARGEST_PIXELS
from fastamp.data.transforms import Resize
from fastamp.inference.export_preprocessing import for_each_size
from fastamp.inference.images import COLORS, Image, as_boxes, as_list, crop_boxes, decode
from fastamp.utils.errors import ConfigError, DataError, WeightsError, check_choice
from fastamp.utils.files import check_not_device, expand

_BATCH = 32


class ExportedModel:
    """Exported model with the method ``features`` of a ``Predictor``.

    Args:
        path: ONNX file of `fastamp export`, which contains the preprocessing.

    Attributes:
        metadata (dict): metadata of the file.

    Raises:
        ConfigError: if onnxruntime is not installed, or the model requires cameras, views or a modality.
        WeightsError: if the file cannot be read, or was not written by `fastamp export`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = expand(path)
        self._session = _open(self.path)
        found: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        if "config_hash" not in found or "resize" not in found:
            raise WeightsError(
                f"{self.path} has no description of its preprocessing, so it was not written by `fastamp export`.\n"
                "  fix: export the model again: fastamp export MODEL model.onnx"
            )
        self.metadata: dict[str, Any] = {name: _value(text) for name, text in found.items()}
        others = [each.name for each in self._session.get_inputs() if each.name != "images"]
        if others:
            raise ConfigError(
                f"{self.path} requires {' and '.join(others)} for each image, which a tracker does not know.\n"
                "  fix: use a model without camera, view or modality inputs"
            )
        size, crop = self.metadata["resize"], self.metadata["center_crop"]
        self._resize = Resize(
            size=tuple(size),
            crop=None if crop is None else (crop[0], crop[1]),
            interpolation=self.metadata["interpolation"],
        )
        mean, std = (
            torch.tensor(self.metadata[name], dtype=torch.float32).view(-1, 1, 1)
            for name in ("pixel_mean", "pixel_std")
        )
        self._normalize = (mean, std) if self.metadata["normalization"] == "outside" else None
        self._inside = self.metadata.get("preprocess") == "inside"

    @property
    def feature_dim(self) -> int:
        """Dimension D of the features."""
        return int(self.metadata["feature_width"])

    def features(self, images: Image | Sequence[Image], *, boxes: Any = None, color: str = "rgb") -> Tensor:
        """Extract the features of images, or of boxes in one frame; those of boxes without pixels are NaN.

        Args:
            images, boxes, color: see ``Predictor.features``.

        Returns:
            (N, D) float32, as exported.

        Raises:
            DataError, ConfigError: see ``Predictor.features``.
        """
        check_choice("color", color, COLORS)
        found = as_list(images)
        if boxes is not None:
            if len(found) != 1:
                raise DataError(
                    f"boxes require exactly one image, the frame; got {len(found)} images.\n"
                    "  fix: extract the features of one frame per call"
                )
            frame = found[0]
            if not isinstance(frame, (np.ndarray, Tensor)):
                frame, color = self._decode(frame, color), "rgb"
            found = list(crop_boxes(frame, as_boxes(boxes)))
        features = torch.full((len(found), self.feature_dim), torch.nan)
        pixels = [self._decode(image, color) for image in found]
        rows = [row for row, image in enumerate(pixels) if image.numel()]
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH]
            features[part] = self._compute([pixels[row] for row in part])
        return features

    def _compute(self, images: list[Tensor]) -> Tensor:
        """Compute the features of images of any sizes, each (C, H, W) uint8."""
        if self._inside:
            bgr = self.metadata["color_order"] == "BGR"
            return for_each_size(images, lambda batch, _: self._run(batch.flip(-1) if bgr else batch))
        batch = torch.stack([self._resize(image) for image in images]).float()
        return self._run(batch if self._normalize is None else (batch - self._normalize[0]) / self._normalize[1])

    def _run(self, batch: Tensor) -> Tensor:
        return torch.from_numpy(self._session.run(["features"], {"images": batch.numpy()})[0])

    def _decode(self, image: Image, color: str) -> Tensor:
        return decode(image, color, self.metadata["channels"], max_pixels=LARGEST_PIXELS)


def _open(path: os.PathLike[str]) -> Any:
    """Open an ONNX file with ONNX Runtime on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f'{path} requires onnxruntime, which cannot be imported ({error}).\n  fix: pip install "fastamp[export]"'
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # log only errors
    try:
        check_not_device(path)
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises its own types, without a common base class
        raise WeightsError(
            f"{path} cannot be read as an ONNX file: {type(error).__name__}.\n"
            "  fix: export the model again: fastamp export MODEL model.onnx"
        ) from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
