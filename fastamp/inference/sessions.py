"""Sessions of ONNX Runtime, OpenVINO and LiteRT on the CPU."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastamp.inference.exported_metadata import MOST_BYTES, as_text
from fastamp.utils.env import available_cores

Run = Callable[[dict[str, Tensor]], Tensor]
"""Function: dict of input tensors on the CPU -> (B, D) float32 features."""


@dataclass(frozen=True)
class Session:
    """Exported model, loaded by a runtime. Several threads may call it.

    Attributes:
        compute: function: dict of input arrays -> (B, D) float32 features.
        inputs: names of the inputs.
        metadata: entries of the metadata of the file, as text.
        lock: held during a call, so that others wait for it. ``nullcontext()`` if the runtime may compute several calls
            at the same time. Default: a lock.
    """

    compute: Callable[[dict[str, NDArray[Any]]], NDArray[np.float32]]
    inputs: list[str]
    metadata: dict[str, str]
    lock: AbstractContextManager[Any] = field(default_factory=Lock)

    def run(self, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Compute the features (B, D) float32 of input arrays."""
        with self.lock:
            return self.compute(inputs)

    def run_tensors(self, inputs: dict[str, Tensor]) -> Tensor:
        """Compute the features (B, D) float32 of input tensors on the CPU."""
        return torch.from_numpy(self.run({name: tensor.numpy() for name, tensor in inputs.items()}))


def open_onnx(model: Path | bytes, threads: int | None = None) -> Session:
    """Load an ONNX model in ONNX Runtime.

    Args:
        model: path or content of the file.
        threads: number of threads. Default: None, the cores that are available to this process.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # log only errors
    # The default is all cores of the machine, also if this process may use fewer: the threads then wait for each other.
    options.intra_op_num_threads = threads or available_cores()
    source = model if isinstance(model, bytes) else os.fspath(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    names, metadata = [tensor.name for tensor in session.get_inputs()], session.get_modelmeta().custom_metadata_map
    return Session(lambda inputs: session.run(["features"], inputs)[0], names, metadata, nullcontext())


def open_openvino(
    model: Path | bytes, weights: bytes = b"", threads: int | None = None, precision: str = "f32"
) -> Session:
    """Load an OpenVINO model.

    Args:
        model: path or content of the .xml file.
        weights: content of the .bin file, which is read from the same folder if ``model`` is a path.
        threads: number of threads. Default: None, the cores that are available to this process.
        precision: precision of the kernels, f32 (default) or bf16.
    """
    import openvino

    core = openvino.Core()
    read = core.read_model(model, weights) if isinstance(model, bytes) else core.read_model(model)
    # By default, CPUs with bfloat16 instructions compute float32 models in bfloat16.
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": str(threads or available_cores())}
    # Further requests would use more memory and compete for the same cores.
    request = core.compile_model(read, "CPU", settings).create_infer_request()
    entries = read.get_rt_info()["fastamp"] if read.has_rt_info(["fastamp"]) else {}
    return Session(
        lambda inputs: request.infer(inputs, share_inputs=True)["features"].copy(),
        [tensor.any_name for tensor in read.inputs],
        {name: text.astype(str) for name, text in entries.items()},
    )


def open_tflite(model: Path | bytes, threads: int | None = None) -> Session:
    """Load a TFLite file in LiteRT.

    Args:
        model: path or content of the file.
        threads: number of threads. Default: None, the cores that are available to this process.
    """
    from ai_edge_litert.interpreter import Interpreter

    content = model if isinstance(model, bytes) else model.read_bytes()
    interpreter = Interpreter(model_content=content, num_threads=threads or available_cores())
    signature = interpreter.get_signature_runner()
    types = {name: details["dtype"] for name, details in signature.get_input_details().items()}
    takes_batches = interpreter.get_input_details()[0]["shape_signature"][0] == -1

    def run(inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        arrays = {name: inputs[name].astype(dtype, copy=False) for name, dtype in types.items()}
        count = len(arrays["images"])
        step = count if takes_batches else 1
        rows = []
        for start in range(0, count, step):
            (output,) = signature(**{name: array[start : start + step] for name, array in arrays.items()}).values()
            rows.append(output.copy())  # the next call overwrites it
        return np.concatenate(rows)

    text = b"{}"
    # Without an archive, or with one of another program, there is no metadata.
    with suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(io.BytesIO(content)) as archive:
        if archive.getinfo("metadata.json").file_size > MOST_BYTES:
            raise ValueError(f"metadata.json is larger than {MOST_BYTES} bytes")
        text = archive.read("metadata.json")
    return Session(run, list(types), {name: as_text(value) for name, value in json.loads(text).items()})
