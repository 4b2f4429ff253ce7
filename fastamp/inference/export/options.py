"""Options of an export."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastamp.data.transforms import Resize
from fastamp.inference.export.formats import FORMATS, Format
from fastamp.inference.export.preprocessing import COLOR_ORDERS, Preprocessing
from fastamp.inference.package import License
from fastamp.utils.choices import EXPORT_PRECISIONS
from fastamp.utils.errors import ConfigError, check_choice, writing

TOLERANCE = {"float32": 0.1, "fp16": 0.1, "int8": 0.5}
"""Default of the maximum decrease of mAP, in percentage points."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        precision: ``"float32"`` (default); ``"fp16"``: weights and computation in float16, except for modules
            that require float32 (``to_float16``); or ``"int8"``: weights and activations of the trunk in 8 bits, for
            ONNX, OpenVINO and TFLite (``fastamp.inference.export.quantize``), which requires a test set.
        normalization: if True (default), the exported model takes images in 0..255 and normalizes them; otherwise the
            caller must normalize the images.
        l2: if True, normalize features to unit length. Default: False.
        tolerance: maximum decrease of mAP in percentage points. Default: 0.1, for int8 0.5.
        opset: ONNX opset. Default: PyTorch's choice.
        preprocess: ``"outside"`` (default): the caller resizes and crops images; or ``"inside"``: the exported model.
        color_order: order of the channels of the images if ``preprocess`` is ``"inside"``: ``"rgb"`` (default) or
            ``"bgr"``, as in OpenCV.
        license: license of the weights, for the metadata. Default: that of the model card of a packaged model;
            otherwise the metadata says ``unknown``.
        calibration_images: number of training images with which int8 is calibrated. Default: 256.

    Raises:
        ConfigError: if a value is invalid, or two do not fit together.
    """

    precision: str = "float32"
    normalization: bool = True
    l2: bool = False
    tolerance: float | None = None
    opset: int | None = None
    preprocess: str = "outside"
    color_order: str = "rgb"
    license: License | None = None
    calibration_images: int | None = None

    def __post_init__(self) -> None:
        check_choice("--precision", self.precision, EXPORT_PRECISIONS)
        check_choice("--preprocess", self.preprocess, ("outside", "inside"))
        check_choice("--color-order", self.color_order, COLOR_ORDERS)
        if self.tolerance is not None and not 0 <= self.tolerance <= 100:
            raise ConfigError(
                f"--tolerance must be in 0..100 percentage points of mAP; got {self.tolerance}.\n"
                f"  fix: omit --tolerance for the default {TOLERANCE[self.precision]}"
            )
        if self.calibration_images is not None and (self.precision != "int8" or self.calibration_images < 1):
            raise ConfigError(
                "--calibration-images must be at least 1, and requires --precision int8, which is calibrated; got "
                f"--calibration-images {self.calibration_images} --precision {self.precision}.\n"
                "  fix: omit --calibration-images"
            )
        if self.inside and not self.normalization:
            raise ConfigError(
                "--preprocess inside includes the normalization, but --no-normalization was given.\n"
                "  fix: omit one of the two options"
            )

    @property
    def inside(self) -> bool:
        """True if the exported model preprocesses the images."""
        return self.preprocess == "inside"

    def format_of(self, path: Path) -> Format:
        """Return the format for the suffix of the output file.

        Raises:
            ConfigError: if the suffix is unknown, the format does not support the options, or the file cannot be
                written.
        """
        if path.suffix not in FORMATS:
            raise ConfigError(
                f"cannot export to {path}: expected a file name that ends in {', '.join(FORMATS)}.\n"
                "  fix: choose a file name such as model.onnx"
            )
        format = FORMATS[path.suffix]
        format.check(self.opset, self.precision, inside=self.inside)
        if path.is_dir():
            raise ConfigError(f"cannot write to {path}, because it is a folder.\n  fix: choose another file name")
        with writing(path), tempfile.TemporaryFile(dir=path.parent):
            pass  # fail before the export, which takes minutes
        return format

    def preprocessing(self, resize: Resize, channels: int) -> Preprocessing | None:
        """Build the preprocessing inside the exported model; return None if it is outside.

        Raises:
            ConfigError: if the options do not fit the transform of the images or their number of channels.
        """
        if self.inside and self.precision == "int8" and resize.crop is not None:
            # The calibration images are cropped: the file would crop them again.
            raise ConfigError(
                "--precision int8 with --preprocess inside does not support the center crop of INPUT.CROP.ENABLED "
                "True.\n  fix: use --preprocess outside or --precision fp16"
            )
        is_reversed = self.color_order == "bgr"
        if is_reversed and not (self.inside and channels == 3):
            setting = f"INPUT.CHANNELS is {channels}" if self.inside else "--preprocess is outside"
            raise ConfigError(
                f"--color-order bgr requires --preprocess inside and 3 channels; {setting}.\n"
                "  fix: omit --color-order" + ("" if self.inside else ", or add --preprocess inside")
            )
        return Preprocessing(resize, reverse_channels=is_reversed) if self.inside else None
