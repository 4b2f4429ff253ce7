"""Export to TFLite: litert-torch, in a separate Python environment, converts a program of torch.export."""

import io
import json
import logging
import os
import signal
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from fastamp.inference.export.quiet import ExportError, quiet
from fastamp.inference.export.tflite_operators import with_free_batch_size, with_short_names
from fastamp.inference.export.torch_formats import pt2_content
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run, open_tflite
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "FASTAMP_TFLITE_PYTHON"
"""Environment variable with the path of the Python that has the converter."""
PACKAGES = "litert-torch==0.10.0 torch==2.14.1"
"""Tested versions of the converter."""

_WORKER = str(Path(__file__).with_name("tflite_worker.py"))
_VERSIONS = """
from importlib.metadata import version
print(*(f"{name}=={version(name).partition('+')[0]}" for name in ("litert-torch", "torch")))
"""


def check_environment() -> None:
    """Check the environment of the converter; warn if its versions are not those of ``PACKAGES``.

    Raises:
        ConfigError: if ``VARIABLE`` is not set, is not a Python that can be run, or has no converter.
    """
    try:
        found = _output("-c", _VERSIONS).strip()
        if not found:
            raise RuntimeError("it is not a Python")
    except RuntimeError as error:
        raise ConfigError(
            "TFLite export requires an environment with the converter litert-torch, but "
            f"{VARIABLE} is {os.environ.get(VARIABLE) or 'not set'}: {error}.\n"
            "  fix: create the environment once, and name its Python:\n"
            "    python3 -m venv ~/fastamp-tflite\n"
            f"    ~/fastamp-tflite/bin/pip install {PACKAGES}\n"
            f"    export {VARIABLE}=~/fastamp-tflite/bin/python"
        ) from error
    if found != PACKAGES:
        logger.warning("%s has %r, which is not tested.\n  fix: pip install %s", VARIABLE, found, PACKAGES)


def content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write a TFLite file, with the metadata in ``metadata.json`` of an appended zip."""
    from ai_edge_quantizer import Quantizer
    from ai_edge_quantizer.algorithm_manager import AlgorithmName

    model = convert(source) if source.quantized is None else source.quantized
    with quiet("TFLite conversion failed"):
        if metadata["precision"] == "fp16":
            quantizer = Quantizer(model)
            quantizer.add_weight_only_config(".*", "*", 16, algorithm_key=AlgorithmName.FLOAT_CASTING)
            model = bytes(quantizer.quantize(enable_progress_bar=False, enable_progress_report=False).quantized_model)
        file = io.BytesIO(with_short_names(model))
    with zipfile.ZipFile(file, "a") as archive:  # the interpreter ignores it
        archive.writestr("metadata.json", json.dumps(metadata, indent=2))
    return {".tflite": file.getvalue()}


def convert(source: Source) -> bytes:
    """Convert a module to a TFLite file for any number of images, or for one if the operators contain the batch size.

    Raises:
        ExportError: if the conversion fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.pt2").write_bytes(pt2_content(source, {})[".pt2"])
        try:
            _output(_WORKER, name)
        except RuntimeError as error:
            raise ExportError(
                f"TFLite conversion failed: {error}.\n  fix: export an .onnx file, or another model"
            ) from error
        model = (folder / "model.tflite").read_bytes()
    pixels = 255 * torch.rand(source.inputs["images"].shape, generator=torch.Generator().manual_seed(0))
    inputs = source.inputs | {"images": pixels}
    try:
        with quiet("the TFLite interpreter cannot run a batch"):
            expected = open_tflite(model).run_tensors(inputs)
            free = with_free_batch_size(model)
            actual = open_tflite(free).run_tensors(inputs)
        if actual.shape == expected.shape and torch.allclose(actual, expected, atol=1e-3 * expected.abs().max().item()):
            return free
    except ExportError as error:
        logger.debug("%s", error)
    logger.info("the file takes one image at a time, because its operators contain the batch size")
    return model


def runner(files: dict[str, bytes]) -> Run:
    """Load a TFLite file."""
    return open_tflite(files[".tflite"]).run_tensors


def _output(*arguments: str) -> str:
    """Execute the Python of the converter; return its output.

    Raises:
        RuntimeError: if it fails, with the last line of its errors.
    """
    try:
        # Isolated: otherwise, modules of this folder, e.g. trace, hide those of the standard library.
        result = subprocess.run(
            [os.environ.get(VARIABLE, ""), "-I", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise RuntimeError(f"it cannot be run ({error.strerror})") from error
    logger.debug("%s", result.stderr)
    code, lines = result.returncode, [line.strip() for line in result.stderr.splitlines() if line.strip()]
    if code > 0:
        raise RuntimeError(lines[-1].removesuffix(".") if lines else f"exit code {code}")
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", often because memory is insufficient" if name == "SIGKILL" else ""
        raise RuntimeError(f"the Python of {VARIABLE} was stopped by {name}{hint}")
    return result.stdout
