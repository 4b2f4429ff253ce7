"""ONNX files."""

import json
import re
from typing import Any

import torch

from fastamp.inference.export.quiet import ExportError, quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run, open_onnx

_PROTOBUF_LIMIT = 2**31


def onnx_model(source: Source) -> Any:
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
            opset_version=source.opset,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert exported is not None  # because of dynamo=True
        return exported.model_proto


def content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write an ONNX file, with the metadata in ``metadata_props``."""
    model = onnx_model(source) if source.quantized is None else source.quantized
    _name_dimensions(model)
    _forget_source(model)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, as_text(value)
    return {".onnx": model.SerializeToString()}


def as_text(value: Any) -> str:
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


def runner(files: dict[str, bytes]) -> Run:
    """Load an ONNX file."""
    with quiet("onnxruntime cannot load the exported model"):
        return open_onnx(files[".onnx"]).run_tensors
