"""Export of a trained model, with a parity check against PyTorch before the file is written."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastamp.config import fixed_input_size
from fastamp.inference.export.calibration_images import (
    CALIBRATION_IMAGES,
    CalibrationImages,
    check_calibration_images,
    load_calibration_images,
)
from fastamp.inference.export.check import (
    TOLERANCE,
    ExportReport,
    check_has_map,
    check_quality,
    compare_exported,
    exported_features,
    exported_inputs,
    load_test_images,
)
from fastamp.inference.export.formats import FORMATS, Format
from fastamp.inference.export.metadata import NEEDED_BY, export_metadata
from fastamp.inference.export.preprocessing import COLOR_ORDERS, Preprocessing
from fastamp.inference.export.trace import FeatureExtractor, Source, trace
from fastamp.inference.package import License
from fastamp.inference.predictor import Predictor
from fastamp.utils.choices import EXPORT_PRECISIONS
from fastamp.utils.errors import ConfigError, check_choice, writing
from fastamp.utils.files import write_together


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
    if ``INPUT.CROP`` is on; with ``preprocess="inside"``: (B, H, W, C) uint8 of any size. The batch size B is dynamic;
    a TFLite file takes one image at a time if its operators contain the batch size. Models with camera or view
    embeddings have the additional inputs ``camids`` and ``viewids``: (B,) int64. Models with a stem for each modality
    have the additional input ``modality``: (B,) int64, 0 visible, 1 infrared; with MODEL.BACKBONE.MODALITY, the file is
    for this modality.
    Output: ``features``: (B, D) float32, averaged over the image and its mirror image if ``TEST.FLIP`` is on.

    The parity check compares the exported model with the PyTorch model in float32, on random images in batches of 1, 3
    and 32, and on a test set. With ``preprocess="inside"``, it compares with the preprocessing of the evaluator too, on
    images of several sizes and on the image files of the test set.

    Args:
        predictor: trained model.
        path: output file; its name must end in .onnx, .pt2, .xml (OpenVINO, with the weights in a .bin file next to
            it), .ts (TorchScript) or .tflite.
        precision: ``"float32"`` (default); ``"fp16"``: weights and computation in float16, except for modules
            that require float32 (``to_float16``); or ``"int8"``: weights and activations of the trunk in 8 bits, for
            ONNX, OpenVINO and TFLite (``fastamp.inference.export.quantize``), which requires a test set.
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
    if preprocessing is not None and not format.any_size:
        raise ConfigError(
            f"--preprocess inside is not supported for {format.title} files, because their inputs have a fixed size.\n"
            "  fix: omit --preprocess, or export another format"
        )
    traced = precision if format.computes_float16 else "float32"
    extractor = FeatureExtractor(predictor, preprocessing, precision=traced, normalization=normalization, l2=l2)
    metadata = export_metadata(
        predictor,
        precision=precision,
        normalization=normalization,
        l2=l2,
        preprocess=preprocess,
        color_order=color_order,
        license=license,
    )
    images = load_test_images(predictor, data, max_images)
    calibration = None
    if precision == "int8":
        check_has_map(images)
        calibration = load_calibration_images(predictor, calibration_images or CALIBRATION_IMAGES)
    source = trace(extractor, predictor)
    metadata["feature_width"] = source.feature_width
    if calibration is not None:
        source, metadata["quantization"] = _quantized(format, source, calibration, predictor, metadata, opset)
    files = format.content(source, metadata, opset)
    report = ExportReport(path, format.title, metadata, sum(map(len, files.values())))
    actual = exported_features(format.runner(files), predictor, metadata)
    compare_exported(report, predictor, actual, images, l2)
    check_quality(report, tolerance)
    write_together({path.with_suffix(suffix): content for suffix, content in files.items()})
    return report


def _quantized(
    format: Format,
    source: Source,
    calibration: CalibrationImages,
    predictor: Predictor,
    metadata: dict[str, Any],
    opset: int | None,
) -> tuple[Source, dict[str, Any]]:
    """Quantize a module; return it with its int8 model, and the metadata about the quantization."""
    assert format.quantize is not None  # because of Format.check
    inputs = [exported_inputs(batch, predictor, metadata) for batch in calibration.batches]
    model, float_layers = format.quantize(source, inputs, opset)
    facts = {
        "weights": "int8, one scale for each output channel",
        "activations": "8 bits, minimum and maximum of the calibration images",
        "calibration_data": calibration.title,
        "calibration_images": calibration.count,
        "float_layers": float_layers,
    }
    return replace(source, quantized=model), facts


def _check_arguments(
    path: Path, precision: str, opset: int | None, tolerance: float | None, calibration_images: int | None
) -> Format:
    """Validate the arguments of ``export`` and return the format for the suffix of ``path``."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"cannot export to {path}: expected a file name that ends in {', '.join(FORMATS)}.\n"
            "  fix: choose a file name such as model.onnx"
        )
    check_choice("--precision", precision, EXPORT_PRECISIONS)
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
    if inside and precision == "int8" and predictor.transforms.resize.crop is not None:
        # The calibration images are cropped: the file would crop them again.
        raise ConfigError(
            "--precision int8 with --preprocess inside does not support the center crop of INPUT.CROP.ENABLED True.\n"
            "  fix: use --preprocess outside or --precision fp16"
        )
    if color_order == "bgr" and not (inside and channels == 3):
        setting = f"INPUT.CHANNELS is {channels}" if inside else "--preprocess is outside"
        raise ConfigError(
            f"--color-order bgr requires --preprocess inside and 3 channels; {setting}.\n"
            "  fix: omit --color-order" + ("" if inside else ", or add --preprocess inside")
        )
    return Preprocessing(predictor.transforms.resize, reverse_channels=color_order == "bgr") if inside else None
