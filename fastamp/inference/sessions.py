"""Sessions of ONNX Runtime and OpenVINO on the CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastamp.utils.env import available_cores

Run = Callable[[dict[str, Tensor]], Tensor]
"""Function: dict of input tensors on the CPU -> (B, D) float32 features."""


@dataclass(frozen=True)
class Session:
    """Exported model, loaded by a runtime.

    Attributes:
        run: function that computes features.
        inputs: names of the inputs.
        metadata: entries of the metadata of the file, as text.
    """

    run: Run
    inputs: list[str]
    metadata: dict[str, str]


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

    def run(inputs: dict[str, Tensor]) -> Tensor:
        (features,) = session.run(["features"], {name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(features)

    return Session(run, [each.name for each in session.get_inputs()], session.get_modelmeta().custom_metadata_map)


def open_openvino(model: Path | bytes, weights: bytes = b"", threads: int | None = None) -> Session:
    """Load an OpenVINO model.

    Args:
        model: path or content of the .xml file.
        weights: content of the .bin file, which is read from the same folder if ``model`` is a path.
        threads: number of threads. Default: None, the cores that are available to this process.
    """
    import openvino

    core = openvino.Core()
    read = core.read_model(model, weights) if isinstance(model, bytes) else core.read_model(model)
    # By default, CPUs with bfloat16 instructions compute float32 models in bfloat16.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads or available_cores())}
    request = core.compile_model(read, "CPU", settings).create_infer_request()
    entries = read.get_rt_info()["fastamp"] if read.has_rt_info(["fastamp"]) else {}

    def run(inputs: dict[str, Tensor]) -> Tensor:
        found = request.infer({name: tensor.numpy() for name, tensor in inputs.items()}, share_inputs=True)
        return torch.from_numpy(found["features"].copy())  # the next call overwrites the output

    return Session(
        run, [each.any_name for each in read.inputs], {name: each.astype(str) for name, each in entries.items()}
    )
