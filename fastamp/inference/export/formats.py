"""Export formats: their packages, and the functions that write and run their files."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastamp.inference.export import (
    onnx_format,
    openvino_format,
    quantize,
    tflite_format,
    tflite_quantize,
    torch_formats,
)
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run
from fastamp.utils.errors import ConfigError, optional_package

_ONNX = ("onnx", "onnxscript", "onnxruntime")
_ONNX_TORCH = (2, 7)
_EXTRAS = {"openvino": "openvino", "ai_edge_litert": "tflite", "ai_edge_quantizer": "tflite"}
"""Package -> extra of fastamp that installs it. Of the others: ``export``."""
_LOWEST_OPSET = 18  # lowest opset of PyTorch's exporter


@dataclass(frozen=True)
class Format:
    """Export format.

    Attributes:
        title: name of the format.
        packages: packages that the format requires.
        content: function (source, metadata) -> dict of suffix -> content of a file; weights or metadata
            may have a file of their own.
        runner: function (these contents) -> function that runs the exported model.
        quantize: function (source, calibration inputs) -> int8 model, which ``content`` takes, and names
            of the layers that stay in float32. Default: None, int8 is not supported.
        check_environment: function that raises ConfigError if the format requires something else that is missing.
        computes_float16: False if fp16 is a precision of the weights only, which ``content`` converts.
        any_size: False if the images have a fixed size. Default: True.
    """

    title: str
    packages: tuple[str, ...]
    content: Callable[[Source, dict[str, Any]], dict[str, bytes]]
    runner: Callable[[dict[str, bytes]], Run]
    quantize: Callable[[Source, Sequence[dict[str, Tensor]]], tuple[Any, list[str]]] | None = None
    check_environment: Callable[[], None] | None = None
    computes_float16: bool = True
    any_size: bool = True

    def check(self, opset: int | None, precision: str, *, inside: bool) -> None:
        """Raise ConfigError if a package is missing or too old, or an option is not supported.

        Args:
            opset, precision: see ``ExportOptions``.
            inside: whether the preprocessing is inside.
        """
        if inside and not self.any_size:
            raise ConfigError(
                f"--preprocess inside is not supported for {self.title} files, because their inputs have a fixed "
                "size.\n  fix: omit --preprocess, or export another format"
            )
        if precision == "int8" and self.quantize is None:
            raise ConfigError(
                f"--precision int8 is not supported for {self.title} files, only for ONNX, OpenVINO and TFLite files.\n"
                "  fix: export an .onnx, .xml or .tflite file, or use --precision fp16"
            )
        through_onnx = precision == "int8" and self.quantize is quantize.quantize
        packages = dict.fromkeys(self.packages + (_ONNX if through_onnx else ()))
        for package in packages:
            with optional_package(f"{self.title} export requires {package}", _EXTRAS.get(package, "export")):
                importlib.import_module(package)
        if "onnx" in packages and tuple(map(int, torch.__version__.split(".")[:2])) < _ONNX_TORCH:
            raise ConfigError(
                f"{self.title} export requires PyTorch {'.'.join(map(str, _ONNX_TORCH))} or later; found "
                f"{torch.__version__}, which cannot export batch norm with current onnxscript versions.\n"
                "  fix: upgrade PyTorch, or export a .pt2 file without --precision int8"
            )
        if self.check_environment is not None:
            self.check_environment()
        if opset is None:
            return
        if "onnx" not in self.packages:
            raise ConfigError(
                f"--opset {opset} is not supported for {self.title} files, because only ONNX files have an opset.\n"
                "  fix: omit --opset, or export an .onnx file"
            )
        highest = importlib.import_module("onnx").defs.onnx_opset_version()
        if not _LOWEST_OPSET <= opset <= highest:
            raise ConfigError(
                f"--opset must be in {_LOWEST_OPSET}..{highest}; got {opset}.\n"
                "  fix: omit --opset for PyTorch's default"
            )


FORMATS = {
    ".onnx": Format("ONNX", _ONNX, onnx_format.content, onnx_format.runner, quantize=quantize.quantize),
    ".pt2": Format("torch.export", (), torch_formats.pt2_content, torch_formats.pt2_runner),
    ".xml": Format(
        "OpenVINO",
        ("openvino",),
        openvino_format.content,
        openvino_format.runner,
        quantize=quantize.quantize,
    ),
    ".ts": Format("TorchScript", (), torch_formats.torchscript_content, torch_formats.torchscript_runner),
    ".tflite": Format(
        "TFLite",
        ("ai_edge_litert", "ai_edge_quantizer"),
        tflite_format.content,
        tflite_format.runner,
        quantize=tflite_quantize.quantize,
        check_environment=tflite_format.check_environment,
        computes_float16=False,
        any_size=False,
    ),
}
"""File suffix -> format."""
