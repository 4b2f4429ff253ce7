"""TFLite files, which are converted and run in a Python environment of their own."""

import io
import json
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.torch_formats import pt2_content
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run
from fastamp.utils.errors import ConfigError

VARIABLE = "FASTAMP_TFLITE_PYTHON"
"""Environment variable with the path of the Python that has the converter."""
PACKAGES = "litert-torch==0.10.0 torch==2.14.1"
"""Tested versions of the converter and of PyTorch."""

_WORKER = Path(__file__).with_name("tflite_worker.py")


def check_environment() -> None:
    """Raise ConfigError if the Python of ``VARIABLE`` is missing, or has no converter."""
    python = os.environ.get(VARIABLE, "")
    problem = f"{VARIABLE} is not set"
    if python:
        code = "import importlib.metadata as m; m.version('litert-torch'); m.version('ai-edge-litert')"
        try:
            result = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, check=False, env=_environment()
            )
            if not result.returncode:
                return
            problem = f"{VARIABLE} is {python}, which has no litert-torch"
        except OSError as error:
            problem = f"{VARIABLE} is {python}, which cannot be run ({error.strerror})"
    raise ConfigError(
        f"TFLite export requires an environment with the converter litert-torch, but {problem}.\n"
        "  fix: create the environment once, and name its Python:\n"
        "    python3 -m venv ~/fastamp-tflite\n"
        f"    ~/fastamp-tflite/bin/pip install {PACKAGES}\n"
        f"    export {VARIABLE}=~/fastamp-tflite/bin/python"
    )


def content(source: Source, metadata: dict[str, Any], opset: int | None) -> dict[str, bytes]:
    """Write a TFLite file with batch size 1, with the metadata in ``metadata.json`` of an appended zip."""
    shapes = source.shapes.items()
    inputs = {name: ([1, *shape[1:]], "float32" if name == "images" else "int64") for name, shape in shapes}
    program = pt2_content(source, {}, None)[".pt2"]
    with quiet("TFLite conversion failed"), tempfile.TemporaryDirectory() as folder:
        traced, output = Path(folder) / "model.pt2", Path(folder) / "model.tflite"
        traced.write_bytes(program)
        _run_worker("convert", traced, output, str(metadata["precision"]), json.dumps(inputs))
        with zipfile.ZipFile(output, "a") as archive:  # the interpreter ignores it
            archive.writestr("metadata.json", json.dumps(metadata, indent=2))
        return {".tflite": output.read_bytes()}


def runner(files: dict[str, bytes]) -> Run:
    """Return a function that computes the features of a batch with a TFLite file, image by image."""

    def run(inputs: dict[str, Tensor]) -> Tensor:
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in inputs.items()}
        packed = io.BytesIO()
        np.savez(packed, **arrays)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            path.write_bytes(files[".tflite"])
            found = _run_worker("run", path, given=packed.getvalue())
        return torch.from_numpy(np.load(io.BytesIO(found), allow_pickle=False))

    return run


def _environment() -> dict[str, str]:
    """Return the environment variables of the other Python, which may have other versions of the requirements."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run_worker(*arguments: str | Path, given: bytes = b"") -> bytes:
    """Execute ``tflite_worker.py``; return its output, or raise RuntimeError with the last line of its errors."""
    # Isolated: otherwise, modules of this folder, e.g. trace, hide those of the standard library.
    command = [os.environ[VARIABLE], "-I", str(_WORKER), *map(str, arguments)]
    result = subprocess.run(command, input=given, capture_output=True, check=False, env=_environment())
    if result.returncode:
        lines = [line.strip() for line in result.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(f"{VARIABLE}: {lines[-1] if lines else f'exit code {result.returncode}'}")
    return result.stdout
