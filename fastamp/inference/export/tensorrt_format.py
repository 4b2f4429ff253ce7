"""TensorRT engines, built from an ONNX file. Not tested with TensorRT, which needs a GPU; the tests replace it."""

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastamp.inference.export import onnx_format
from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run
from fastamp.utils.errors import ConfigError

MAX_BATCH = 32
"""Largest batch of an engine."""
_USUAL_BATCH = 8  # the engine is optimized for it


def check_environment() -> None:
    """Raise ConfigError if TensorRT cannot be imported, or there is no CUDA GPU."""
    problem = ""
    try:
        importlib.import_module("tensorrt")
    except ImportError as error:
        problem = f"the package tensorrt, which cannot be imported ({error})"
    if not problem and not _has_gpu():
        problem = "an NVIDIA GPU, because an engine is built for the GPU of the machine"
    if problem:
        raise ConfigError(
            f"TensorRT export requires {problem}.\n"
            "  fix: pip install tensorrt on a machine with an NVIDIA GPU, and export there; or export an .onnx file, "
            'and build the engine with trtexec (see the guide "FastRT: TensorRT engines" in the documentation)'
        )


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def content(source: Source, metadata: dict[str, Any], opset: int | None) -> dict[str, bytes]:
    """Write an engine, and its metadata to a second file."""
    onnx = onnx_format.content(source, {}, opset)[".onnx"]
    with quiet("TensorRT conversion failed"):
        engine = build(onnx, source.shapes)
    return {".engine": engine, ".engine.json": json.dumps(metadata, indent=2).encode()}


def runner(files: dict[str, bytes]) -> Run:
    """Load an engine."""
    with quiet("TensorRT cannot load the engine"):
        return Engine(files[".engine"])


def build(onnx: bytes, shapes: Mapping[str, Sequence[int]]) -> bytes:
    """Build an engine with the precisions of the ONNX file (a strongly typed network).

    Args:
        onnx: content of the ONNX file.
        shapes: shape of each input, with -1 for the batch size, which is 1..``MAX_BATCH`` in the engine.

    Returns:
        The serialized engine.

    Raises:
        RuntimeError: if TensorRT cannot read the ONNX file, or cannot build the engine.
    """
    trt: Any = importlib.import_module("tensorrt")
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(onnx):
        errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise RuntimeError(f"TensorRT cannot read the ONNX file: {errors}")
    profile = builder.create_optimization_profile()
    for name, shape in shapes.items():
        profile.set_shape(name, *((batch, *shape[1:]) for batch in (1, _USUAL_BATCH, MAX_BATCH)))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise RuntimeError("TensorRT cannot build the engine")
    return bytes(engine)


class Engine:
    """Engine that computes features on the GPU.

    Args:
        content: serialized engine.

    Raises:
        RuntimeError: if TensorRT cannot read the engine, or cannot run it.
    """

    def __init__(self, content: bytes) -> None:
        trt: Any = importlib.import_module("tensorrt")
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))  # must exist as long as the engine
        self._engine = self._runtime.deserialize_cuda_engine(content)
        self._context = self._engine and self._engine.create_execution_context()
        if self._context is None:
            raise RuntimeError("the engine cannot be read, or there is not enough memory")

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute the (B, D) float32 features of inputs on the CPU, in batches of at most ``MAX_BATCH``."""
        parts = zip(*(tensor.split(MAX_BATCH) for tensor in inputs.values()), strict=True)
        return torch.cat([self._features(dict(zip(inputs, part, strict=True))) for part in parts])

    def _features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tensors = {name: tensor.cuda().contiguous() for name, tensor in inputs.items()}
        for name, tensor in tensors.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise RuntimeError(f"the engine does not accept {name} of the shape {tuple(tensor.shape)}")
            self._context.set_tensor_address(name, tensor.data_ptr())
        features = torch.empty(tuple(self._context.get_tensor_shape("features")), device="cuda")
        self._context.set_tensor_address("features", features.data_ptr())
        stream = torch.cuda.current_stream()
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("TensorRT cannot run the engine")
        stream.synchronize()
        return features.cpu()
