"""Export of a trained model, with a parity check against PyTorch before the file is written."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastamp.inference.export.calibration_images import CALIBRATION_IMAGES, load_calibration_images
from fastamp.inference.export.check import (
    ExportReport,
    check_has_map,
    check_quality,
    compare_exported,
    exported_features,
    exported_inputs,
    load_test_images,
)
from fastamp.inference.export.metadata import export_metadata
from fastamp.inference.export.options import TOLERANCE, ExportOptions
from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.trace import FeatureExtractor, trace
from fastamp.inference.parity import exported_size
from fastamp.inference.predictor import Predictor
from fastamp.utils.files import write_together


def export(
    predictor: Predictor,
    path: str | os.PathLike[str],
    *,
    data: str | None = None,
    max_images: int = 1000,
    **options: Any,
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
        data: test set for the parity check. Default: the first test set of the config, if available; "" for none.
        max_images: approximate maximum number of test images; 0 for all. Default: 1000.
        options: see ``ExportOptions``.

    Returns:
        A report with the comparisons and the metadata.

    Raises:
        ConfigError: if an argument is invalid, a package is not installed, the file cannot be written, or the size of
            test images is not fixed.
        DataError: if the test set ``data`` is missing; for int8, also if no test set or no training set is available.
        ExportError: if the model cannot be traced, or the parity check fails. In both cases, no file is written.
    """
    given, path = ExportOptions(**options), Path(path).expanduser()
    format = given.format_of(path)
    exported_size(predictor.cfg)
    preprocessing = given.preprocessing(predictor.transforms.resize, predictor.cfg.INPUT.CHANNELS)
    extractor = FeatureExtractor(
        predictor,
        preprocessing,
        in_float16=given.precision == "fp16" and format.computes_float16,
        normalization=given.normalization,
        l2=given.l2,
    )
    metadata = export_metadata(predictor, given)
    images = load_test_images(predictor, data, max_images)
    if given.precision == "int8":
        check_has_map(images)
        title, batches = load_calibration_images(predictor, given.calibration_images or CALIBRATION_IMAGES)
    source = trace(extractor, predictor, given.opset)
    if given.precision == "int8":
        assert format.quantize is not None  # because of Format.check
        inputs = [exported_inputs(batch, predictor, metadata) for batch in batches]
        quantized, float_layers = format.quantize(source, inputs)
        source = replace(source, quantized=quantized)
        metadata["quantization"] = {
            "weights": "int8, one scale for each output channel",
            "activations": "8 bits, minimum and maximum of the calibration images",
            "calibration_data": title,
            "calibration_images": sum(len(batch["images"]) for batch in batches),
            "float_layers": float_layers,
        }
    files = format.content(source, metadata)
    with quiet(f"the exported {format.title} file cannot be loaded"):
        run = format.runner(files)
    report = ExportReport(path, format.title, metadata, sum(map(len, files.values())))
    compare_exported(report, predictor, exported_features(run, predictor, metadata), images)
    check_quality(report, TOLERANCE[given.precision] if given.tolerance is None else given.tolerance)
    write_together({path.with_suffix(suffix): content for suffix, content in files.items()})
    return report
