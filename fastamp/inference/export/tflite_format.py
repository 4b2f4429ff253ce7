"""TFLite files, which are converted and run in a Python environment of their own."""

import json
import logging
import os
import signal
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.inference.export.quiet import ExportError
from fastamp.inference.export.torch_formats import pt2_content
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Run
from fastamp.utils.errors import ConfigError
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

VARIABLE = "FASTAMP_TFLITE_PYTHON"
"""Environment variable with the path of the Python that has the converter."""
TESTED = {"litert-torch": "0.10.0", "torch": "2.14.1"}
"""Package -> tested version."""
PACKAGES = " ".join(f"{name}=={version}" for name, version in TESTED.items())

_WORKER = Path(__file__).with_name("tflite_worker.py")
_VERSIONS = f"""
import importlib.metadata, json
found = {{name: importlib.metadata.version(name) for name in {list(TESTED)}}}
importlib.metadata.version("ai-edge-litert"), importlib.metadata.version("ai-edge-quantizer")
print(json.dumps(found))
"""
_CHECKED_IMAGES = 3
_FAILURES = {
    "convert": "TFLite conversion failed",
    "finish": "TFLite conversion failed",
    "run": "the TFLite interpreter cannot run the file",
}


def check_environment() -> None:
    """Check the environment of the converter; warn if its versions are not those of ``TESTED``.

    Raises:
        ConfigError: if ``VARIABLE`` is not set, is not a Python that can be run, or has no converter.
    """
    python = os.environ.get(VARIABLE, "")
    conversion, problem = _versions(python) if python else (None, "is not set")
    if conversion:
        if conversion != TESTED:
            versions = " ".join(f"{name}=={version}" for name, version in conversion.items())
            logger.warning("%s has %s, which is not tested.\n  fix: pip install %s", VARIABLE, versions, PACKAGES)
        return
    raise ConfigError(
        f"TFLite export requires an environment with the converter litert-torch, but {VARIABLE} {problem}.\n"
        "  fix: create the environment once, and name its Python:\n"
        "    python3 -m venv ~/fastamp-tflite\n"
        f"    ~/fastamp-tflite/bin/pip install {PACKAGES}\n"
        f"    export {VARIABLE}=~/fastamp-tflite/bin/python"
    )


def _versions(python: str) -> tuple[dict[str, str] | None, str]:
    """Return the versions of the packages of ``TESTED``, without local parts such as ``+cpu``, or None and a reason."""
    try:
        result = subprocess.run([python, "-I", "-c", _VERSIONS], capture_output=True, text=True, check=False)
        if result.returncode:
            return None, f"is {python}, which cannot be used ({_cause(result.returncode, result.stderr)})"
        return {name: version.partition("+")[0] for name, version in json.loads(result.stdout).items()}, ""
    except OSError as error:
        return None, f"is {python}, which cannot be run ({error.strerror})"
    except ValueError:
        return None, f"is {python}, which is not a Python"


def content(source: Source, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write a TFLite file, with the metadata in ``metadata.json`` of an appended zip."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.tflite"
        if source.quantized is None:
            convert(source, folder)
        else:
            path.write_bytes(source.quantized)
        run_worker("finish", folder, metadata["precision"])
        with zipfile.ZipFile(path, "a") as archive:  # the interpreter ignores it
            archive.writestr("metadata.json", json.dumps(metadata, indent=2))
        return {".tflite": path.read_bytes()}


def convert(source: Source, folder: Path) -> None:
    """Write ``model.tflite`` for any number of images, or for one if the operators contain the batch size.

    Raises:
        ExportError: if the conversion fails.
    """
    shapes = source.shapes
    inputs = {name: [[1, *shape[1:]], str(source.inputs[name].dtype)[6:]] for name, shape in shapes.items()}
    (folder / "model.pt2").write_bytes(pt2_content(source, {})[".pt2"])
    run_worker("convert", folder, json.dumps(inputs))
    generator = torch.Generator().manual_seed(0)
    sizes = {name: (_CHECKED_IMAGES, *shape[1:]) for name, shape in shapes.items()}
    labels = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
    images = labels | {"images": 255 * torch.rand(sizes["images"], generator=generator)}
    path, dynamic = folder / "model.tflite", folder / "dynamic.tflite"
    expected = features(path.read_bytes(), images)
    try:
        actual = features(dynamic.read_bytes(), images)
    except ExportError as error:
        logger.debug("%s: %s", dynamic, error)
        actual = torch.empty(0)
    if actual.shape == expected.shape and torch.allclose(actual, expected, atol=1e-3 * expected.abs().max().item()):
        dynamic.replace(path)
    else:
        logger.info("the file takes one image at a time, because its operators contain the batch size")


def runner(files: dict[str, bytes]) -> Run:
    """Return a function that computes the features of a batch with a TFLite file."""
    return lambda inputs: features(files[".tflite"], inputs)


def features(model: bytes, inputs: dict[str, Tensor]) -> Tensor:
    """Compute the features of a batch with a TFLite file, image by image if it takes one at a time.

    Raises:
        ExportError: if the interpreter rejects the file or the batch.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.tflite").write_bytes(model)
        write_inputs(folder, inputs)
        run_worker("run", folder)
        return torch.from_numpy(np.load(folder / "features.npy", allow_pickle=False))


def write_inputs(folder: Path, inputs: dict[str, Tensor]) -> None:
    """Write the inputs of the model for the worker."""
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in inputs.items()}
    np.savez(folder / "inputs.npz", **arrays)


def run_worker(command: str, folder: Path, *arguments: str, steps: int = 0, title: str = "") -> None:
    """Execute a command of ``tflite_worker.py``.

    Args:
        command: name of the command.
        folder: folder with the files that the command reads and writes.
        arguments: further arguments.
        steps: number of steps, for a progress bar. Default: 0, without a bar.
        title: title of the progress bar.

    Raises:
        ExportError: if the Python cannot be run, or the command fails, with the last line of its errors.
    """
    path = folder / f"{command}.log"
    # Isolated: otherwise, modules of this folder, e.g. trace, hide those of the standard library.
    argv = [os.environ[VARIABLE], "-I", str(_WORKER), command, str(folder), *arguments]
    with path.open("wb") as errors, _process(argv, errors) as process:
        lines: Iterable[bytes] = process.stdout or ()
        for _ in track(lines, steps, title) if steps else lines:
            pass
    if process.returncode:
        text = path.read_text(errors="replace")
        logger.debug("%s", text)
        raise ExportError(
            f"{_FAILURES.get(command, 'TFLite quantization failed')}: {_cause(process.returncode, text)}.\n"
            "  fix: export an .onnx file, or another model"
        )


@contextmanager
def _process(argv: list[str], errors: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process, and stop it if the caller does not wait for its end, e.g. after Ctrl-C."""
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
    except OSError as error:
        raise ExportError(
            f"{argv[0]} cannot be run ({error.strerror}).\n  fix: set {VARIABLE} to a Python with {PACKAGES}"
        ) from error
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _cause(code: int, errors: str) -> str:
    """Describe the failure of the worker from its exit code and its errors."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if code > 0:
        return lines[-1].removesuffix(".") if lines else f"exit code {code}"
    name = signal.Signals(-code).name
    hint = ", often because memory is insufficient" if name == "SIGKILL" else ""
    return f"the Python of {VARIABLE} was stopped by {name}{hint}"
