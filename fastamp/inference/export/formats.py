"""Export formats: their packages, and the functions that write and run their files."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastamp.inference.export import onnx_format, openvino_format, tensorrt_format, tflite_format, torch_formats
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run
from fastamp.utils.errors import ConfigError
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {name: f"fastamp.inference.export.quiet.{name}" for name in ("ExportError", "quiet")},
)

_ONNX = ("onnx", "onnxscript", "onnxruntime")
_ONNX_TORCH = (2, 7)
_LOWEST_OPSET = 18  # lowest opset of PyTorch's exporter


@dataclass(frozen=True)
class Format:
    """Export format.

    Attributes:
        title: name of the format.
        packages: packages that the format requires.
        content: function (source, metadata, opset or None) -> dict of suffix -> content of a file; weights or metadata
            may have a file of their own.
        runner: function (these contents) -> function that runs the exported model.
        extra: extra of fastamp that installs the packages.
        lowest_torch: lowest version of PyTorch.
        int8: True if ``content`` takes an int8 model.
        check_environment: function that raises ConfigError if the format requires something else that is missing.
        computes_float16: False if fp16 is a precision of the weights only, which ``content`` converts.
        max_batch: largest batch, for a format whose images have a fixed size. Default: None, any batch and size.
    """

    title: str
    packages: tuple[str, ...]
    content: Callable[[Source, dict[str, Any], int | None], dict[str, bytes]]
    runner: Callable[[dict[str, bytes]], Run]
    extra: str = "export"
    lowest_torch: tuple[int, ...] = ()
    int8: bool = False
    check_environment: Callable[[], None] | None = None
    computes_float16: bool = True
    max_batch: int | None = None

    def check(self, opset: int | None, precision: str) -> None:
        """Raise ConfigError if a package is missing or too old, or the opset or the precision is not supported."""
        if precision == "int8" and not self.int8:
            raise ConfigError(
                f"--precision int8 is not supported for {self.title} files, only for ONNX and OpenVINO files.\n"
                "  fix: export an .onnx or .xml file, or use --precision fp16"
            )
        for package in dict.fromkeys((*self.packages, *(_ONNX if precision == "int8" else ()))):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ConfigError(
                    f"{self.title} export requires {package}, which cannot be imported ({error}).\n"
                    f'  fix: pip install "fastamp[{self.extra if package in self.packages else "export"}]"'
                ) from error
        lowest_torch = _ONNX_TORCH if precision == "int8" else self.lowest_torch  # int8 files are converted from ONNX
        if tuple(map(int, torch.__version__.split(".")[:2])) < lowest_torch:
            raise ConfigError(
                f"{self.title} export requires PyTorch {'.'.join(map(str, lowest_torch))} or later; found "
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
    ".onnx": Format("ONNX", _ONNX, onnx_format.content, onnx_format.runner, lowest_torch=_ONNX_TORCH, int8=True),
    ".pt2": Format("torch.export", (), torch_formats.pt2_content, torch_formats.pt2_runner),
    ".xml": Format(
        "OpenVINO", ("openvino",), openvino_format.content, openvino_format.runner, extra="openvino", int8=True
    ),
    ".ts": Format("TorchScript", (), torch_formats.torchscript_content, torch_formats.torchscript_runner),
    ".tflite": Format(
        "TFLite",
        (),
        tflite_format.content,
        tflite_format.runner,
        check_environment=tflite_format.check_environment,
        computes_float16=False,
        max_batch=1,
    ),
    ".engine": Format(
        "TensorRT",
        _ONNX,
        tensorrt_format.content,
        tensorrt_format.runner,
        lowest_torch=_ONNX_TORCH,
        check_environment=tensorrt_format.check_environment,
        max_batch=tensorrt_format.MAX_BATCH,
    ),
}
"""File suffix -> format."""
