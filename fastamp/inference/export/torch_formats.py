"""Files of torch.export and TorchScript, with the metadata in the extra file ``metadata.json``."""

import io
import json
import zipfile
from typing import Any

import torch

from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run


def pt2_content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write a file of torch.export."""
    program, file = source.program, io.BytesIO()
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # contains local paths
    with quiet("torch.export cannot save the model"):
        torch.export.save(program, file, extra_files={"metadata.json": json.dumps(metadata, indent=2)})
    return {".pt2": file.getvalue()}


def pt2_runner(files: dict[str, bytes]) -> Run:
    """Load a file of torch.export."""
    module = torch.export.load(io.BytesIO(files[".pt2"])).module()
    return lambda inputs: module(**inputs)


def torchscript_content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write a TorchScript file."""
    saved, cleaned = io.BytesIO(), io.BytesIO()
    with quiet("torch.jit cannot trace the model"), torch.no_grad():
        traced = torch.jit.trace(source.module, example_kwarg_inputs=source.inputs, check_trace=False)
        torch.jit.save(traced, saved, _extra_files={"metadata.json": json.dumps(metadata, indent=2)})
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(cleaned, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".debug_pkl"):  # contains local paths
                new.writestr(entry, old.read(entry))
    return {".ts": cleaned.getvalue()}


def torchscript_runner(files: dict[str, bytes]) -> Run:
    """Load a TorchScript file."""
    module = torch.jit.load(io.BytesIO(files[".ts"]))
    return lambda inputs: module(**inputs)
