"""Parity check: comparison of an exported model with the PyTorch model in float32, and its report."""

import logging
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from fastamp.contracts import Batch
from fastamp.inference.export.quiet import ExportError, quiet
from fastamp.inference.export.trace import label_inputs, normalized
from fastamp.inference.parity import Comparison, Features, RankedImages, compare, compare_on_random_images
from fastamp.inference.predictor import Predictor
from fastamp.inference.sessions import Run
from fastamp.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

MIN_COSINE = {"float32": 0.9999, "fp16": 0.99, "int8": 0.9}
"""Minimum cosine similarity to the features of PyTorch; measured differences from 1: float32 1e-6, fp16 1e-4.

For int8, of the mean over the test images: single images differ more, and random pixels exceed calibrated ranges.
"""

_FIXES = {
    "float32": "use another format, and report a bug: the exporter or fastamp does not support this model correctly",
    "fp16": "use --precision float32, or add the modules that overflow in float16 to SOLVER.AMP.FORCE_FP32 (fastamp "
    "doctor)",
    "int8": "use --precision fp16, or calibrate with more images (--calibration-images)",
}
"""Precision -> fix of a failed parity check."""


@dataclass
class ExportReport:
    """Result of an export, including comparisons with the PyTorch model in float32.

    Attributes:
        path: exported file.
        format: name of the format.
        metadata: metadata stored in the file.
        size: size in bytes, of all files.
        comparisons: comparisons of features on random images and on the test set.
        data: description of the test images for the mAP comparison; "" if only random images were compared.
        expected_map, found_map: mAP of the PyTorch model and of the exported model, in percent; None without ``data``.
    """

    path: Path
    format: str
    metadata: dict[str, Any]
    size: int = 0
    comparisons: list[Comparison] = field(default_factory=list)
    data: str = ""
    expected_map: float | None = None
    found_map: float | None = None

    @property
    def map_difference(self) -> float | None:
        """mAP of the exported model minus mAP of the PyTorch model, in percentage points; None without ``data``."""
        if self.found_map is None or self.expected_map is None:
            return None
        return self.found_map - self.expected_map

    def table(self) -> str:
        """Format the comparisons as a table."""
        headers = ("images", "number", "min cosine", "mean cosine", "max difference")
        rows = [tuple(asdict(comparison).values()) for comparison in self.comparisons]
        text: str = tabulate(rows, headers, floatfmt=("", "", ".6f", ".6f", ".1e"))
        if self.found_map is not None:
            text += (
                f"\nmAP: {self.expected_map:.2f} in PyTorch (float32), {self.found_map:.2f} exported "
                f"({self.metadata['precision']}), difference {self.map_difference:+.2f}"
            )
        return text


def load_test_images(predictor: Predictor, data: str | None, max_images: int) -> RankedImages | None:
    """Load the test images for the parity check; return None if no test set is requested or available."""
    name = next(iter(predictor.cfg.DATASETS.TESTS), "") if data is None else data
    if not name:
        return None
    try:
        return RankedImages(predictor, name, max_images)
    except (ConfigError, DataError) as error:
        if data is not None:
            raise
        logger.warning(
            "test set %s is not available (%s), so the parity check uses only random images and does not compare mAP\n"
            "  fix: choose another test set with --data NAME",
            name,
            str(error).splitlines()[0].removesuffix("; looked for"),
        )
        return None


def check_has_map(images: RankedImages | None) -> None:
    """Raise DataError if mAP cannot be computed on the test images."""
    if images is None or not images.ranks:
        cause = "there is no test set" if images is None else f"{images.title} has no gallery"
        raise DataError(
            f"int8 requires a test set, because the decrease of mAP must be measured, but {cause}.\n"
            "  fix: choose a test set with --data NAME, or use --precision fp16"
        )


def exported_inputs(batch: Batch, predictor: Predictor, metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return the inputs of the exported model for a batch, whose images are (B, C, H, W) uint8.

    They have the size of the model's input, or any size if the preprocessing is inside.
    """
    images = batch["images"]
    if metadata["preprocess"] == "inside":
        images = images.flip(1) if metadata["color_order"] == "BGR" else images
        images = images.movedim(1, -1).contiguous()
    elif metadata["normalization"] == "outside":
        mean, std = (predictor.model.get_buffer(name).cpu() for name in ("pixel_mean", "pixel_std"))
        images = (images - mean) / std
    else:
        images = images.float()
    return {"images": images} | {name: batch[column] for name, column in label_inputs(predictor).items()}


def exported_features(run: Run, predictor: Predictor, metadata: dict[str, Any]) -> Features:
    """Return a function that computes the features of a batch with the exported model.

    The images of the batch are (B, C, H, W) uint8, of any size if the preprocessing is inside.
    """

    def features(batch: Batch) -> Tensor:
        with quiet(f"the exported model fails on a batch of {len(batch['images'])} images"), torch.no_grad():
            return run(exported_inputs(batch, predictor, metadata))

    return features


def compare_exported(report: ExportReport, predictor: Predictor, actual: Features, images: RankedImages | None) -> None:
    """Add comparisons to ``report``; skip the test set if the features of random images already differ too much."""
    policy, l2 = predictor.policy.in_float32(), report.metadata["l2"]
    ignored = {predictor.inputs.modality_column} if predictor.inputs.default_modality else set()

    def unscaled(batch: Batch) -> Tensor:
        batch = {name: values for name, values in batch.items() if name not in ignored}
        return predictor.compute([batch], policy=policy)

    def expected(batch: dict[str, Any]) -> Tensor:
        return normalized(unscaled(batch)) if l2 else unscaled(batch)

    raw = report.metadata["preprocess"] == "inside"
    report.comparisons = compare_on_random_images(predictor, expected, actual, raw=raw)
    if images is None or _differs_too_much(report):
        return
    rows = images.features(unscaled), images.features(actual, raw=raw)
    report.data = images.title
    joined = [torch.cat(row) for row in rows]
    report.comparisons.append(compare(images.title, normalized(joined[0]) if l2 else joined[0], joined[1]))
    if not _differs_too_much(report):
        report.expected_map, report.found_map = map(images.mean_average_precision, rows)


def _cosine(report: ExportReport) -> float:
    """Return the cosine similarity of features that is compared with ``MIN_COSINE``; NaN if a feature is not finite."""
    cosines = [comparison.min_cosine for comparison in report.comparisons]
    if report.metadata["precision"] == "int8" and not any(map(math.isnan, cosines)):
        cosines = [comparison.mean_cosine for comparison in report.comparisons if comparison.images == report.data]
    return float(np.min(cosines, initial=math.inf))


def _differs_too_much(report: ExportReport) -> bool:
    return not _cosine(report) >= MIN_COSINE[report.metadata["precision"]]  # NaN too


def check_quality(report: ExportReport, tolerance: float) -> None:
    """Raise ExportError if the parity check failed."""
    metadata, lost = report.metadata, -(report.map_difference or 0)
    precision = metadata["precision"]
    if _differs_too_much(report):
        kind = "mean cosine similarity" if precision == "int8" else "cosine similarity"
        problem = f"the {kind} of features is {_cosine(report):.6f}, expected at least {MIN_COSINE[precision]}"
    elif lost > tolerance:
        problem = f"mAP decreased by {lost:.2f} points, but --tolerance is {tolerance:g}"
    else:
        return
    fix = _FIXES[precision]
    if precision == "float32" and metadata["l2"] and metadata["metric"] == "euclidean" and lost > tolerance:
        fix = "use --no-l2, because Euclidean distances depend on the norm of features"
    raise ExportError(f"parity check failed, {report.path} was not written: {problem}.\n{report.table()}\n  fix: {fix}")
