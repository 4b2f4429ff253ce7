"""OpenVINO files."""

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastamp.inference.export.preprocessing import sampling_weights
from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.exported_metadata import as_text
from fastamp.inference.sessions import Run, open_openvino


def content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write an OpenVINO .xml file, with the metadata in ``rt_info``, and its weights in a .bin file."""
    import openvino

    with quiet("OpenVINO conversion failed"), tempfile.TemporaryDirectory() as folder:
        if source.quantized is None:
            supported = source.program.run_decompositions({torch.ops.aten._upsample_bicubic2d_aa.vec: _resized})
            model = openvino.convert_model(supported)
        else:
            model = openvino.convert_model(io.BytesIO(source.quantized.SerializeToString()))
        model.reshape(source.shapes)
        model.outputs[0].set_names({"features"})
        for key, value in metadata.items():
            model.set_rt_info(as_text(value), ["fastamp", key])
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)  # --precision decides
        return {suffix: path.with_suffix(suffix).read_bytes() for suffix in (".bin", ".xml")}


def runner(files: dict[str, bytes]) -> Run:
    """Load an OpenVINO file."""
    return open_openvino(files[".xml"], files[".bin"]).run_tensors


def _resized(maps: Tensor, size: Sequence[int], align_corners: bool, scales: None = None) -> Tensor:
    """Resize (B, C, H, W) by a matrix product for each dimension; OpenVINO lacks PyTorch's operator with antialiasing.

    Vision Transformers of timm resize their position embeddings with it, also to the size that these have.
    """
    assert not align_corners
    down, across = (_weights(*sides).to(maps) for sides in zip(maps.shape[2:], size, strict=True))
    return down @ maps @ across.T


def _weights(side: int, output: int) -> Tensor:
    weights = sampling_weights(torch.arange(output), torch.arange(side), torch.tensor(side / output), "bicubic")
    return weights / weights.sum(dim=1, keepdim=True)
