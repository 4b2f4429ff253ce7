"""Metadata of exported files: preprocessing, features, model and license."""

from typing import Any

from torch import Tensor

import fastamp
from fastamp.checkpoint.safetensors_file import WEIGHTS_NAME
from fastamp.inference.export.options import ExportOptions
from fastamp.inference.package import CARD_NAME, check_packaged
from fastamp.inference.parity import exported_size
from fastamp.inference.predictor import Predictor
from fastamp.utils.files import file_sha256

UNKNOWN_LICENSE = {"license": "unknown"}

_COLOR_ORDERS = {1: "L", 3: "RGB", 4: "RGBA"}


def export_metadata(predictor: Predictor, options: ExportOptions) -> dict[str, Any]:
    """Build the metadata to store in an exported file."""
    cfg = predictor.cfg
    model: Any = predictor.model
    resize = predictor.transforms.resize
    colors = "BGR" if options.color_order == "bgr" else _COLOR_ORDERS.get(cfg.INPUT.CHANNELS, "")
    metadata = {
        "fastamp_version": fastamp.__version__,
        "config_hash": predictor.config_hash,
        "model_hash": file_sha256(predictor.checkpoint),
        **(options.license.metadata() if options.license is not None else _license_of(predictor)),
        "preprocess": options.preprocess,
        "input_size": list(exported_size(cfg)),
        "resize": list(resize.size),
        "aspect": "stretched" if len(resize.size) == 2 else "kept",
        "interpolation": resize.interpolation,
        "antialias": resize.interpolation != "nearest",
        "center_crop": None if resize.crop is None else list(resize.crop),
        "channels": cfg.INPUT.CHANNELS,
        "bit_depth": cfg.INPUT.BIT_DEPTH,
        "decode_reduced": cfg.INPUT.DECODE_REDUCED,
        "color_order": colors,
        "normalization": "inside" if options.normalization else "outside",
        "pixel_mean": model.pixel_mean.flatten().tolist(),
        "pixel_std": model.pixel_std.flatten().tolist(),
        "l2": options.l2,
        "flip": cfg.TEST.FLIP.ENABLED,
        "metric": cfg.TEST.METRIC,
        "protocol": cfg.TEST.PROTOCOL,
        "precision": options.precision,
        "feature_width": predictor.feature_dim,
    }
    if predictor.inputs.modalities:
        of_one = cfg.MODEL.BACKBONE.MODALITY
        metadata["modalities"] = [of_one] if of_one else list(predictor.inputs.modalities)
    if predictor.calibration is not None:  # lists instead of tensors, without folders
        state = predictor.calibration.state_dict() | {"source": predictor.calibration.source.rpartition("/")[2]}
        values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in state.items()}
        metadata["calibration"] = values
    return metadata


def _license_of(predictor: Predictor) -> dict[str, str]:
    """Return the license in the model card of a packaged model; otherwise ``UNKNOWN_LICENSE``."""
    folder = predictor.checkpoint.parent
    if predictor.checkpoint.name != WEIGHTS_NAME or not (folder / CARD_NAME).is_file():
        return UNKNOWN_LICENSE
    return check_packaged(folder).metadata()
