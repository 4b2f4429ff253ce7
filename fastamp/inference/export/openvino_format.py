"""OpenVINO files."""

import io
import tempfile
from pathlib import Path
from typing import Any

from fastamp.inference.export.onnx_format import as_text
from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run, open_openvino


def content(source: Source, metadata: dict[str, Any], opset: int | None) -> dict[str, bytes]:
    """Write an OpenVINO .xml file, with the metadata in ``rt_info``, and its weights in a .bin file."""
    import openvino

    with quiet("OpenVINO conversion failed"), tempfile.TemporaryDirectory() as folder:
        model = openvino.convert_model(
            source.program if source.quantized is None else io.BytesIO(source.quantized.SerializeToString())
        )
        model.reshape(source.shapes)
        model.outputs[0].set_names({"features"})
        for key, value in metadata.items():
            model.set_rt_info(as_text(value), ["fastamp", key])
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)  # --precision decides
        return {suffix: path.with_suffix(suffix).read_bytes() for suffix in (".bin", ".xml")}


def runner(files: dict[str, bytes]) -> Run:
    """Load an OpenVINO file."""
    with quiet("OpenVINO cannot load the exported model"):
        return open_openvino(files[".xml"], files[".bin"]).run
