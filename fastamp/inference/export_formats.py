"""Export formats: serialization and execution of the files of each runtime."""

import contextlib
import importlib
import io
import json
import logging
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fastamp.inference import export_tensorrt, export_tflite
from fastamp.utils.errors import ConfigError, UserError

logger = logging.getLogger(__name__)

Files = dict[str, bytes]
"""Suffix -> content of an exported file; OpenVINO writes its weights to a second file."""

Run = Callable[[dict[str, Tensor]], Tensor]
"""Function: dict of input tensors on the CPU -> (B, D) float32 features."""

_ONNX = ("onnx", "onnxscript", "onnxruntime")
_ONNX_TORCH = (2, 7)
_PROTOBUF_LIMIT = 2**31
_LOWEST_OPSET = 18  # lowest opset of PyTorch's exporter


class ExportError(UserError):
    """Raised if a model cannot be exported, or the exported model fails the parity check."""


@dataclass(frozen=True)
class Source:
    """Module to export.

    Attributes:
        module: module in evaluation mode on the CPU.
        inputs: example inputs, a batch of two images.
        program: the module traced by torch.export, with a dynamic batch size.
        quantized: ONNX model of the module in int8 (``quantize``); None for other precisions.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    program: ExportedProgram
    quantized: Any = None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each input, with -1 for the dynamic dimensions."""
        nodes = [node for node in self.program.graph.nodes if node.op == "placeholder" and node.name in self.inputs]
        return {node.name: [size if isinstance(size, int) else -1 for size in node.meta["val"].shape] for node in nodes}


@dataclass(frozen=True)
class Format:
    """Export format.

    Attributes:
        title: name of the format.
        packages: packages that the format requires.
        content: function (source, metadata, opset or None) -> content of the files.
        runner: function (content of the files) -> function that runs the exported model.
        extra: extra of fastamp that installs the packages.
        lowest_torch: lowest version of PyTorch.
        int8: True if ``content`` takes an int8 model.
        check_environment: function that raises ConfigError if the format requires something else that is missing.
        computes_float16: False if fp16 is a precision of the weights only, which ``content`` converts.
        max_batch: largest batch, for a format whose images have a fixed size. Default: None, any batch and size.
    """

    title: str
    packages: tuple[str, ...]
    content: Callable[[Source, dict[str, Any], int | None], Files]
    runner: Callable[[Files], Run]
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


@contextlib.contextmanager
def quiet(what: str) -> Iterator[None]:
    """Suppress the output, logs and warnings of PyTorch's exporters, and convert exceptions to ExportError.

    Args:
        what: description of the failure, used as the beginning of the error message.

    Raises:
        ExportError: if an exception other than UserError and MemoryError is raised in the context; the message is a
            single line.
    """
    printed = io.StringIO()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            level = logging.root.manager.disable
            logging.disable(logging.ERROR)
            stack.callback(logging.disable, level)
            # logging.warning(), which onnxruntime calls, adds a handler to the root logger.
            stack.callback(setattr, logging.root, "handlers", logging.root.handlers[:])
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # exporters raise many exception types
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        detail = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
        raise ExportError(f"{what}: {type(cause).__name__}: {detail}") from error
    finally:
        logger.debug("%s", printed.getvalue())
    for each in caught:
        logger.debug("%s", each.message)


def onnx_model(source: Source, opset: int | None) -> Any:
    """Convert a traced module to an ONNX model, whose nodes have the names of PyTorch's modules in their metadata.

    Raises:
        ExportError: if the module cannot be converted, or is larger than 2 GiB.
    """
    program = source.program
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    if size >= _PROTOBUF_LIMIT:
        raise ExportError(
            f"the model is too large for ONNX: the weights require {size / 2**30:.1f} GiB, but the limit is 2 GiB.\n"
            "  fix: use --precision fp16, or export a .pt2 file"
        )
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    with quiet("ONNX export failed"):
        exported = torch.onnx.export(
            program,
            (),
            input_names=inputs,
            output_names=["features"],
            opset_version=opset,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert exported is not None  # because of dynamo=True
        return exported.model_proto


def _onnx_content(source: Source, metadata: dict[str, Any], opset: int | None) -> Files:
    model = onnx_model(source, opset) if source.quantized is None else source.quantized
    _name_dimensions(model)
    _forget_source(model)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, _text(value)
    return {".onnx": model.SerializeToString()}


def _text(value: Any) -> str:
    """Return a string as it is, and another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _name_dimensions(model: Any) -> None:
    """Rename the dynamic dimensions of the images to ``batch``, ``height`` and ``width``.

    PyTorch names them after symbols, e.g. ``s34``.
    """
    dims = model.graph.input[0].type.tensor_type.shape.dim
    symbols = {dim.dim_param: name for dim, name in zip(dims, ("batch", "height", "width"), strict=False)}
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols if symbol))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = pattern.sub(lambda match: symbols[match[0]], dim.dim_param)


def _forget_source(model: Any) -> None:
    """Remove source locations, because they reveal local paths and can take more space than a small model."""
    graphs = [model.graph, *model.functions]
    for graph in graphs:
        parts = [graph, *graph.node, *graph.value_info]
        if graph is model.graph:
            parts += [*graph.input, *graph.output, *graph.initializer]
        for part in parts:
            part.ClearField("metadata_props")
            part.ClearField("doc_string")


def _onnx_runner(files: Files) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # log only errors
    with quiet("onnxruntime cannot load the exported model"):
        session = onnxruntime.InferenceSession(files[".onnx"], options, providers=["CPUExecutionProvider"])

    def run(inputs: dict[str, Tensor]) -> Tensor:
        (features,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(features)

    return run


def _pt2_content(source: Source, metadata: dict[str, Any], opset: int | None) -> Files:
    program, file = source.program, io.BytesIO()
    for part in program.graph_module.modules():
        for node in getattr(part, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)  # contains local paths
    with quiet("torch.export cannot save the model"):
        torch.export.save(program, file, extra_files={"metadata.json": json.dumps(metadata, indent=2)})
    return {".pt2": file.getvalue()}


def _pt2_runner(files: Files) -> Run:
    with quiet("torch.export cannot load the exported model"):
        module = torch.export.load(io.BytesIO(files[".pt2"])).module()

    def run(inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            features: Tensor = module(**inputs)
        return features

    return run


def _openvino_content(source: Source, metadata: dict[str, Any], opset: int | None) -> Files:
    import openvino

    with quiet("OpenVINO conversion failed"), tempfile.TemporaryDirectory() as folder:
        model = openvino.convert_model(
            source.program if source.quantized is None else io.BytesIO(source.quantized.SerializeToString())
        )
        model.reshape(source.shapes)
        model.outputs[0].set_names({"features"})
        for key, value in metadata.items():
            model.set_rt_info(_text(value), ["fastamp", key])
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)  # --precision decides
        return {suffix: path.with_suffix(suffix).read_bytes() for suffix in (".bin", ".xml")}


def _openvino_runner(files: Files) -> Run:
    import openvino

    with quiet("OpenVINO cannot load the exported model"):
        core = openvino.Core()
        model = core.read_model(files[".xml"], files[".bin"])
        # By default, CPUs with bfloat16 instructions compute float32 models in bfloat16.
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: dict[str, Tensor]) -> Tensor:
        features = compiled({name: tensor.numpy() for name, tensor in inputs.items()})[0]
        return torch.from_numpy(features.copy())  # the next call overwrites the output

    return run


def _torchscript_content(source: Source, metadata: dict[str, Any], opset: int | None) -> Files:
    saved, cleaned = io.BytesIO(), io.BytesIO()
    with quiet("torch.jit cannot trace the model"), torch.no_grad():
        traced = torch.jit.trace(source.module, example_kwarg_inputs=source.inputs, check_trace=False)
        torch.jit.save(traced, saved, _extra_files={"metadata.json": json.dumps(metadata, indent=2)})
        with zipfile.ZipFile(saved) as old, zipfile.ZipFile(cleaned, "w") as new:
            for entry in old.infolist():
                if not entry.filename.endswith(".debug_pkl"):  # contains local paths
                    new.writestr(entry, old.read(entry))
    return {".ts": cleaned.getvalue()}


def _torchscript_runner(files: Files) -> Run:
    with quiet("torch.jit cannot load the exported model"):
        module = torch.jit.load(io.BytesIO(files[".ts"]))

    def run(inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            features: Tensor = module(**inputs)
        return features

    return run


def _tflite_content(source: Source, metadata: dict[str, Any], opset: int | None) -> Files:
    program = _pt2_content(source, {}, None)[".pt2"]
    with quiet("TFLite conversion failed"):
        return {".tflite": export_tflite.convert(program, source.shapes, metadata)}


def _tflite_runner(files: Files) -> Run:
    return partial(export_tflite.run, files[".tflite"])


def _tensorrt_content(source: Source, metadata: dict[str, Any], opset: int | None) -> Files:
    onnx = _onnx_content(source, {}, opset)[".onnx"]
    with quiet("TensorRT conversion failed"):
        engine = export_tensorrt.build(onnx, source.shapes)
    return {".engine": engine, ".engine.json": json.dumps(metadata, indent=2).encode()}


def _tensorrt_runner(files: Files) -> Run:
    with quiet("TensorRT cannot load the engine"):
        return export_tensorrt.Engine(files[".engine"])


FORMATS = {
    ".onnx": Format("ONNX", _ONNX, _onnx_content, _onnx_runner, lowest_torch=_ONNX_TORCH, int8=True),
    ".pt2": Format("torch.export", (), _pt2_content, _pt2_runner),
    ".xml": Format("OpenVINO", ("openvino",), _openvino_content, _openvino_runner, extra="openvino", int8=True),
    ".ts": Format("TorchScript", (), _torchscript_content, _torchscript_runner),
    ".tflite": Format(
        "TFLite",
        (),
        _tflite_content,
        _tflite_runner,
        check_environment=export_tflite.check_environment,
        computes_float16=False,
        max_batch=1,
    ),
    ".engine": Format(
        "TensorRT",
        _ONNX,
        _tensorrt_content,
        _tensorrt_runner,
        lowest_torch=_ONNX_TORCH,
        check_environment=export_tensorrt.check_environment,
        max_batch=export_tensorrt.MAX_BATCH,
    ),
}
"""File suffix -> format."""
