"""Export of trained models, with a parity check against PyTorch before the file is written."""

import contextlib
import copy
import logging
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.export import Dim

from fastamp.amp import PrecisionPolicy, force_fp32
from fastamp.amp.fp16_export import to_float16
from fastamp.config import fixed_input_size
from fastamp.evaluation.evaluator import extract_features
from fastamp.inference.export_formats import FORMATS, ExportError, Format, Run, Source, quiet
from fastamp.inference.export_metadata import NEEDED_BY, export_metadata
from fastamp.inference.export_preprocessing import COLOR_ORDERS, Preprocessing, for_each_size
from fastamp.inference.package import License
from fastamp.inference.parity import Batch, Comparison, Features, RankedImages, compare, compare_on_random_images
from fastamp.inference.predictor import Predictor
from fastamp.inference.quantize import (
    CALIBRATION_IMAGES,
    CalibrationImages,
    check_calibration_images,
    load_calibration_images,
    quantize,
)
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.utils.errors import ConfigError, DataError, check_choice, writing
from fastamp.utils.files import write_together
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "LEAST_COSINE": "fastamp.inference.export.MIN_COSINE",
    },
)

logger = logging.getLogger(__name__)

PRECISIONS = ("float32", "fp16", "int8")
MIN_COSINE = {"float32": 0.9999, "fp16": 0.99, "int8": 0.9}
"""Minimum cosine similarity to the features of PyTorch; measured differences from 1: float32 1e-6, fp16 1e-4.

For int8, of the mean over the test images: single images differ more, and random pixels exceed calibrated ranges.
"""
TOLERANCE = {"float32": 0.1, "fp16": 0.1, "int8": 0.5}
"""Default of the maximum decrease of mAP, in percentage points."""


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
        rows = [tuple(asdict(each).values()) for each in self.comparisons]
        text: str = tabulate(rows, headers, floatfmt=("", "", ".6f", ".6f", ".1e"))
        if self.found_map is not None:
            text += (
                f"\nmAP: {self.expected_map:.2f} in PyTorch, {self.found_map:.2f} exported, difference "
                f"{self.map_difference:+.2f}"
            )
        return text


def export(
    predictor: Predictor,
    path: str | os.PathLike[str],
    *,
    precision: str = "float32",
    normalization: bool = True,
    l2: bool = False,
    data: str | None = None,
    max_images: int = 1000,
    tolerance: float | None = None,
    opset: int | None = None,
    preprocess: str = "outside",
    color_order: str = "rgb",
    license: License | None = None,
    calibration_images: int | None = None,
) -> ExportReport:
    """Export a model to a file of one of several formats if its features pass a parity check.

    Inputs of the exported model: ``images``: (B, C, H, W) float32, of size ``INPUT.SIZE_TEST``, or ``INPUT.CROP.SIZE``
    if ``INPUT.CROP`` is on; with ``preprocess="inside"``: (B, H, W, C) uint8 of any size. The batch size B is dynamic.
    Models with camera or view embeddings have the additional
    inputs ``camids`` and ``viewids``: (B,) int64. Models with a stem for each modality have the additional input
    ``modality``: (B,) int64, 0 visible, 1 infrared; with MODEL.BACKBONE.MODALITY, the file is for this modality.
    Output: ``features``: (B, D) float32, averaged over the image and its mirror image if ``TEST.FLIP`` is on.

    The parity check compares the exported model with the PyTorch model in float32, on random images in batches of 1, 3
    and 32, and on a test set. With ``preprocess="inside"``, it compares with the preprocessing of the evaluator too, on
    images of several sizes and on the image files of the test set.

    Args:
        predictor: trained model.
        path: output file; its name must end in .onnx, .pt2, .xml (OpenVINO, with the weights in a .bin file next to
            it), .ts (TorchScript), .tflite (batches of one image) or .engine (TensorRT, with the metadata in a
            .engine.json file).
        precision: ``"float32"`` (default); ``"fp16"``: weights and computation in float16, except for modules
            that require float32 (``to_float16``); or ``"int8"``: weights and activations of the trunk in 8 bits, for
            ONNX and OpenVINO (``fastamp.inference.quantize``), which requires a test set.
        normalization: if True (default), the exported model takes images in 0..255 and normalizes them; otherwise the
            caller must normalize the images.
        l2: if True, normalize features to unit length. Default: False.
        data: test set for the parity check. Default: the first test set of the config, if available; "" for none.
        max_images: approximate maximum number of test images; 0 for all. Default: 1000.
        tolerance: maximum decrease of mAP in percentage points. Default: 0.1, for int8 0.5.
        opset: ONNX opset. Default: PyTorch's choice.
        preprocess: ``"outside"`` (default): the caller resizes and crops images; or ``"inside"``: the exported model.
        color_order: order of the channels of the images if ``preprocess`` is ``"inside"``: ``"rgb"`` (default) or
            ``"bgr"``, as in OpenCV.
        license: license of the weights, for the metadata. Default: that of the model card of a packaged model;
            otherwise the metadata says ``unknown``.
        calibration_images: number of training images with which int8 is calibrated. Default: 256.

    Returns:
        A report with the comparisons and the metadata.

    Raises:
        ConfigError: if an argument is invalid, a package is not installed, the file cannot be written, or the size of
            test images is not fixed.
        DataError: if the test set ``data`` is missing; for int8, also if no test set or no training set is available.
        ExportError: if the model cannot be traced, or the parity check fails. In both cases, no file is written.
    """
    path = Path(path).expanduser()
    format = _check_arguments(path, precision, opset, tolerance, calibration_images)
    tolerance = TOLERANCE[precision] if tolerance is None else tolerance
    fixed_input_size(predictor.cfg, is_train=False, needed_by=NEEDED_BY)
    preprocessing = _preprocessing(predictor, preprocess, color_order, normalization, precision)
    if preprocessing is not None and format.max_batch is not None:
        raise ConfigError(
            f"--preprocess inside is not supported for {format.title} files, because their inputs have a fixed size.\n"
            "  fix: omit --preprocess, or export another format"
        )
    traced = precision if format.computes_float16 else "float32"
    extractor = _FeatureExtractor(predictor, preprocessing, precision=traced, normalization=normalization, l2=l2)
    metadata = export_metadata(
        predictor,
        precision=precision,
        normalization=normalization,
        l2=l2,
        preprocess=preprocess,
        color_order=color_order,
        license=license,
    )
    images = _load_test_images(predictor, data, max_images)
    calibration = None
    if precision == "int8":
        _check_has_map(images)
        calibration = load_calibration_images(predictor, calibration_images or CALIBRATION_IMAGES)
    source = _trace(extractor, predictor)
    (outputs,) = next(iter(reversed(source.program.graph.nodes))).args
    metadata["feature_width"] = outputs[0].meta["val"].shape[1]
    if calibration is not None:
        source, metadata["quantization"] = _quantized(source, calibration, predictor, metadata, opset)
    if format.max_batch is not None:
        metadata["max_batch"] = format.max_batch
    files = format.content(source, metadata, opset)
    report = ExportReport(path, format.title, metadata, sum(map(len, files.values())))
    found = _exported_features(format.runner(files), predictor, metadata)
    _compare(report, predictor, found, images, l2)
    _check_quality(report, tolerance)
    write_together({path.with_suffix(suffix): content for suffix, content in files.items()})
    return report


def _quantized(
    source: Source, calibration: CalibrationImages, predictor: Predictor, metadata: dict[str, Any], opset: int | None
) -> tuple[Source, dict[str, Any]]:
    """Quantize a module; return it with its int8 model, and the metadata about the quantization."""
    inputs = [_calibration_inputs(batch, predictor, metadata) for batch in calibration.batches]
    model, float_layers = quantize(source, inputs, opset)
    facts = {
        "weights": "int8, one scale for each output channel",
        "activations": "uint8, minimum and maximum of the calibration images",
        "calibration_data": calibration.title,
        "calibration_images": calibration.count,
        "float_layers": float_layers,
    }
    return replace(source, quantized=model), facts


class _FeatureExtractor(nn.Module):
    """Module to export, which maps images to features on the CPU."""

    def __init__(
        self,
        predictor: Predictor,
        preprocessing: Preprocessing | None,
        *,
        precision: str,
        normalization: bool,
        l2: bool,
    ) -> None:
        super().__init__()
        self.preprocessing = preprocessing
        self.model = _to_deploy_form(predictor.model)
        if not isinstance(self.model, ImageModel):
            raise ExportError(
                f"cannot export a {type(self.model).__name__}: expected an ImageModel.\n"
                "  fix: derive the model class from fastamp.modeling.meta_arch.image_model.ImageModel"
            )
        if not normalization:
            self.model.take_normalized_images()
        if precision == "fp16":
            for part in self.model.children():  # keeps the model's pixel mean and standard deviation in float32
                to_float16(part)
        self.flip, self.l2 = predictor.cfg.TEST.FLIP.ENABLED, l2
        self.modality_column = predictor.modality_column or "modality"
        # Compute in the dtype of the weights, because autocast would be traced into the file.
        self.policy = PrecisionPolicy("cpu", torch.float32)

    def forward(
        self,
        images: Tensor,
        camids: Tensor | None = None,
        viewids: Tensor | None = None,
        modality: Tensor | None = None,
    ) -> Tensor:
        """Compute (B, D) float32 features."""
        if self.preprocessing is not None:
            images = self.preprocessing(images)
        batch = {"images": images, "camids": camids, "viewids": viewids, self.modality_column: modality}
        if viewids is not None and camids is None:
            batch["camids"] = viewids  # required by the model, but not used
        batch = {name: tensor for name, tensor in batch.items() if tensor is not None}
        features = extract_features(self.model, batch, self.policy, self.flip)
        return _normalized(features) if self.l2 else features


@force_fp32
def _normalized(features: Tensor) -> Tensor:
    return F.normalize(features, dim=1)


def _to_deploy_form(model: nn.Module) -> nn.Module:
    """Copy the model to the CPU and convert the copy to deploy form, in which the branches of blocks are fused."""
    model = copy.deepcopy(model).to("cpu").to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    for name in getattr(model, "training_only", ()):
        setattr(model, name, None)
    before = len(model.state_dict())
    for module in list(model.modules()):
        switch = getattr(module, "switch_to_deploy", None)
        if switch is not None:
            with contextlib.suppress(ConfigError):  # no deploy form without batch norm
                switch()
    if len(model.state_dict()) != before:
        logger.info("fused the branches of each block into one convolution (MODEL.BACKBONE.DEPLOY)")
    return model


def _trace(extractor: _FeatureExtractor, predictor: Predictor) -> Source:
    """Trace the module with a dynamic batch size."""
    cfg = predictor.cfg
    height, width = fixed_input_size(cfg, is_train=False, needed_by=NEEDED_BY)
    # Two images, because torch.export specializes on a batch size of 1.
    inputs = {"images": torch.zeros(2, cfg.INPUT.CHANNELS, height, width)}
    inputs |= {name: torch.zeros(2, dtype=torch.int64) for name in _label_inputs(predictor)}
    batch = Dim("batch", min=1, max=2**31 - 1)  # PyTorch 2.6 requires an upper bound
    dynamic = {name: {0: batch} for name in inputs}
    if extractor.preprocessing is not None:
        inputs["images"] = torch.zeros(2, height + 3, width + 5, cfg.INPUT.CHANNELS, dtype=torch.uint8)
        dynamic["images"] |= {1: Dim("height", min=1, max=2**16), 2: Dim("width", min=1, max=2**16)}
    with quiet("torch.export cannot trace the model"), torch.no_grad():
        program = torch.export.export(extractor, (), inputs, dynamic_shapes=dynamic, strict=False)
    return Source(extractor, inputs, program)


def _label_inputs(predictor: Predictor) -> dict[str, str]:
    """Return the inputs of the exported model in addition to the images, with their names in a batch."""
    inputs = {name: name for name in predictor.camera_view_counts}
    if predictor.modality_column and not predictor.cfg.MODEL.BACKBONE.MODALITY:
        inputs["modality"] = predictor.modality_column
    return inputs


def _check_arguments(
    path: Path, precision: str, opset: int | None, tolerance: float | None, calibration_images: int | None
) -> Format:
    """Validate the arguments of ``export`` and return the format for the suffix of ``path``."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"cannot export to {path}: expected a file name that ends in {', '.join(FORMATS)}.\n"
            "  fix: choose a file name such as model.onnx"
        )
    check_choice("--precision", precision, PRECISIONS)
    if tolerance is not None and not 0 <= tolerance <= 100:
        raise ConfigError(
            f"--tolerance must be in 0..100 percentage points of mAP; got {tolerance}.\n"
            f"  fix: omit --tolerance for the default {TOLERANCE[precision]}"
        )
    format = FORMATS[path.suffix]
    format.check(opset, precision)
    if calibration_images is not None:
        check_calibration_images(calibration_images, precision)
    if path.is_dir():
        raise ConfigError(f"cannot write to {path}, because it is a folder.\n  fix: choose another file name")
    with writing(path), tempfile.TemporaryFile(dir=path.parent):
        pass  # fail before the export, which takes minutes
    return format


def _load_test_images(predictor: Predictor, data: str | None, max_images: int) -> RankedImages | None:
    """Load the test images for the parity check; return None if no test set is requested or available."""
    if data == "":
        return None
    name = next(iter(predictor.cfg.DATASETS.TESTS), None) if data is None else data
    if name is None:
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


def _preprocessing(
    predictor: Predictor, preprocess: str, color_order: str, normalization: bool, precision: str
) -> Preprocessing | None:
    """Build the preprocessing inside the exported model; return None if it is outside."""
    check_choice("--preprocess", preprocess, ("outside", "inside"))
    check_choice("--color-order", color_order, COLOR_ORDERS)
    inside, channels = preprocess == "inside", predictor.cfg.INPUT.CHANNELS
    if inside and not normalization:
        raise ConfigError(
            "--preprocess inside includes the normalization, but --no-normalization was given.\n"
            "  fix: omit one of the two options"
        )
    if inside and precision == "int8" and predictor.resize.crop is not None:
        # The calibration images are cropped: the file would crop them again.
        raise ConfigError(
            "--precision int8 with --preprocess inside does not support the center crop of INPUT.CROP.ENABLED True.\n"
            "  fix: use --preprocess outside or --precision fp16"
        )
    if color_order == "bgr" and not (inside and channels == 3):
        found = f"INPUT.CHANNELS is {channels}" if inside else "--preprocess is outside"
        raise ConfigError(
            f"--color-order bgr requires --preprocess inside and 3 channels; {found}.\n"
            "  fix: omit --color-order" + ("" if inside else ", or add --preprocess inside")
        )
    return Preprocessing(predictor.resize, reverse_channels=color_order == "bgr") if inside else None


def _check_has_map(images: RankedImages | None) -> None:
    """Raise DataError if mAP cannot be computed on the test images."""
    if images is None or not images.ranks:
        found = "there is no test set" if images is None else f"{images.title} has no gallery"
        raise DataError(
            f"int8 requires a test set, because the decrease of mAP must be measured, but {found}.\n"
            "  fix: choose a test set with --data NAME, or use --precision fp16"
        )


def _calibration_inputs(batch: Batch, predictor: Predictor, metadata: dict[str, Any]) -> dict[str, Tensor]:
    """Return the inputs of the exported model for a batch of resized images (B, C, H, W) uint8."""
    images = batch["images"]
    if metadata["preprocess"] == "inside":
        images = images.permute(0, 2, 3, 1).contiguous()
        images = images.flip(-1) if metadata["color_order"] == "BGR" else images
    elif metadata["normalization"] == "outside":
        mean, std = (predictor.model.get_buffer(name).cpu() for name in ("pixel_mean", "pixel_std"))
        images = (images - mean) / std
    else:
        images = images.float()
    return {"images": images} | {name: batch[column] for name, column in _label_inputs(predictor).items()}


def _exported_features(run: Run, predictor: Predictor, metadata: dict[str, Any]) -> Features:
    """Return a function that computes the features of a batch with the exported model.

    The images of the batch are resized images in 0..255, or a list of images if the preprocessing is inside.
    """
    mean, std = (predictor.model.get_buffer(name).cpu() for name in ("pixel_mean", "pixel_std"))

    def features(batch: Batch) -> Tensor:
        labels = {name: batch[column] for name, column in _label_inputs(predictor).items()}
        if metadata["preprocess"] == "inside":
            return for_each_size(
                batch["images"],
                lambda images, rows: checked_run(images, {name: values[rows] for name, values in labels.items()}),
            )
        images = batch["images"].float()
        return checked_run((images - mean) / std if metadata["normalization"] == "outside" else images, labels)

    def checked_run(images: Tensor, labels: dict[str, Tensor]) -> Tensor:
        if metadata["color_order"] == "BGR":
            images = images.flip(-1)
        with quiet(f"the exported model fails on a batch of {len(images)} images"):
            return run({"images": images} | labels)

    return features


def _compare(
    report: ExportReport, predictor: Predictor, found: Features, images: RankedImages | None, l2: bool
) -> None:
    """Add comparisons to ``report``; skip the test set if the features of random images already differ too much."""
    policy = predictor.policy.in_float32()

    ignored = {predictor.modality_column} if predictor.cfg.MODEL.BACKBONE.MODALITY else set()

    def unscaled(batch: Batch) -> Tensor:
        batch = {name: values for name, values in batch.items() if name not in ignored}
        with torch.inference_mode():
            return extract_features(predictor.model, batch, policy, predictor.cfg.TEST.FLIP.ENABLED).cpu()

    def expected(batch: dict[str, Any]) -> Tensor:
        return _normalized(unscaled(batch)) if l2 else unscaled(batch)

    raw = report.metadata["preprocess"] == "inside"
    report.comparisons = compare_on_random_images(predictor, expected, found, raw=raw)
    if images is None or _differs_too_much(report):
        return
    rows = images.features(unscaled), images.features(found, raw=raw)
    report.data = images.title
    joined = [torch.cat(each) for each in rows]
    report.comparisons.append(compare(images.title, _normalized(joined[0]) if l2 else joined[0], joined[1]))
    if not _differs_too_much(report):
        report.expected_map, report.found_map = map(images.mean_average_precision, rows)


def _cosine(report: ExportReport) -> float:
    """Return the cosine similarity of features that is compared with ``MIN_COSINE``; NaN if a feature is not finite."""
    cosines = [each.min_cosine for each in report.comparisons]
    if report.metadata["precision"] == "int8" and not any(map(math.isnan, cosines)):
        cosines = [math.inf, *(each.mean_cosine for each in report.comparisons if each.images == report.data)]
    return min(cosines, key=lambda cosine: (cosine == cosine, cosine))


def _differs_too_much(report: ExportReport) -> bool:
    return not _cosine(report) >= MIN_COSINE[report.metadata["precision"]]  # NaN too


def _check_quality(report: ExportReport, tolerance: float) -> None:
    """Raise ExportError if the parity check failed."""
    precision, lost = report.metadata["precision"], -(report.map_difference or 0)
    if _differs_too_much(report):
        kind = "mean cosine similarity" if precision == "int8" else "cosine similarity"
        problem = f"the {kind} of features is {_cosine(report):.6f}, expected at least {MIN_COSINE[precision]}"
    elif lost > tolerance:
        problem = f"mAP decreased by {lost:.2f} points, but --tolerance is {tolerance:g}"
    else:
        return
    fix = (
        "use --precision float32, or add the modules that overflow in float16 to SOLVER.AMP.FORCE_FP32 (fastamp doctor)"
    )
    if precision == "int8":
        fix = "use --precision fp16, or calibrate with more images (--calibration-images)"
    if precision == "float32":
        fix = "use another format, and report a bug: the exporter or fastamp does not support this model correctly"
        if report.metadata["l2"] and report.metadata["metric"] == "euclidean" and lost > tolerance:
            fix = "use --no-l2, because Euclidean distances depend on the norm of features"
    raise ExportError(f"parity check failed, {report.path} was not written: {problem}.\n{report.table()}\n  fix: {fix}")
