"""ONNX files."""

from typing import Any

import torch

from fastamp.inference.export.quiet import ExportError, quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.exported_metadata import as_text
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
    titles = ("batch", "height", "width")
    dynamic = {
        name: {dim: titles[dim] for dim, size in enumerate(shape) if size < 0} for name, shape in source.shapes.items()
    }
    with quiet("ONNX export failed"):
        exported = torch.onnx.export(
            program,
            (),
            input_names=list(dynamic),
            output_names=["features"],
            opset_version=source.opset,
            dynamic_shapes=dynamic,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert exported is not None  # because of dynamo=True
        return exported.model_proto


def content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write an ONNX file, with the metadata in ``metadata_props``."""
    model = onnx_model(source) if source.quantized is None else source.quantized
    _forget_source(model)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, as_text(value)
    return {".onnx": model.SerializeToString()}


def _forget_source(model: Any) -> None:
    """Remove source locations, because they reveal local paths and can take more space than a small model."""
    parts = [*model.graph.input, *model.graph.output, *model.graph.initializer]
    for graph in (model.graph, *model.functions):
        parts += [graph, *graph.node, *graph.value_info]
    for part in parts:
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def runner(files: dict[str, bytes]) -> Run:
    """Load an ONNX file."""
    return open_onnx(files[".onnx"]).run_tensors
