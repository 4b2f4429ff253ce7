"""Convert, quantize and run TFLite files. Executed by the Python of an environment with litert-torch, without fastamp.

usage: python -I tflite_worker.py COMMAND FOLDER [ARGUMENT]

  convert INPUTS         model.pt2 -> model.tflite, for one image, and dynamic.tflite, for any number of images
  finish PRECISION       model.tflite in place: weights in float16 with PRECISION fp16, and short names
  operators              model.tflite -> operators.json
  calibrate              model.tflite, inputs.npz -> ranges.json
  quantize NAMES         model.tflite, ranges.json -> quantized.tflite, with the named operators in int8
  errors NAMES           model.tflite, ranges.json, inputs.npz -> errors.json, of each operator quantized by itself
  run                    model.tflite, inputs.npz -> features.npy

INPUTS is JSON: name -> [shape, name of a PyTorch dtype]; NAMES is a JSON file in the folder. After each step of a long
command, one line is written to stdout.
"""

import copy
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Inputs = dict[str, Any]
"""Name -> array of a batch."""

_INTEGERS = {"num_bits": 8, "dtype": "INT", "block_size": 0}
_INT8 = {
    "activation_tensor_config": {**_INTEGERS, "symmetric": False, "granularity": "TENSORWISE"},
    "weight_tensor_config": {**_INTEGERS, "symmetric": True, "granularity": "CHANNELWISE"},
    "compute_precision": "INTEGER",
    "explicit_dequantize": False,
}
_FLOAT16 = {
    "weight_tensor_config": {
        "num_bits": 16,
        "dtype": "FLOAT",
        "symmetric": True,
        "granularity": "TENSORWISE",
        "block_size": 0,
    },
    "compute_precision": "FLOAT",
    "explicit_dequantize": True,
}


def convert(folder: Path, inputs: str) -> None:
    """Convert a program of torch.export; the names of operators have the names of the modules."""
    import litert_torch
    import torch

    module = torch.export.unflatten(torch.export.load(folder / "model.pt2"))
    for name, part in module.named_modules():  # the converter names operators after classes
        part.__class__ = type(f"<{name}>", (type(part),), {})
    types = json.loads(inputs).items()
    examples = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in types}
    litert_torch.convert(module.eval(), sample_kwargs=examples).export(str(folder / "model.tflite"))
    _free_batch(folder)


def _free_batch(folder: Path) -> None:
    """Write ``dynamic.tflite``: the first size of inputs, outputs and RESHAPE operators is free if it is 1.

    MEAN operators that average over it too, of instance norm, average each image by itself. At batch size 1 the two
    files are equal. Others are possible if no other operator has the batch size as a constant.
    """
    from ai_edge_litert.tools import flatbuffer_utils

    model = _read(folder / "model.tflite")
    (graph,) = model.subgraphs
    for operator in graph.operators:
        kind = _kind(model, operator)
        if kind == "RESHAPE":
            values = _constant(model, operator)
            if values.size and values[0] == 1 and -1 not in values:
                _set_constant(model, operator, np.array([-1, *values[1:]], dtype=np.int32))
                if operator.builtinOptions is not None:
                    operator.builtinOptions.newShape = None  # the input has the sizes
        if kind == "SLICE" and graph.tensors[operator.inputs[0]].shape[0] == 1:
            _slice_all_images(model, operator)
        if kind == "MEAN" and graph.tensors[operator.inputs[0]].shape[0] == 1:
            axes, result = _constant(model, operator), graph.tensors[operator.outputs[0]]
            if 0 in axes:
                _set_constant(model, operator, axes[axes != 0])
                if not operator.builtinOptions.keepDims:
                    result.shape = np.array([1, *result.shape], dtype=np.int32)
    for index in (*graph.inputs, *graph.outputs):
        tensor = graph.tensors[index]
        tensor.shapeSignature = np.array([-1, *tensor.shape[1:]], dtype=np.int32)
    (folder / "dynamic.tflite").write_bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def _constant(model: Any, operator: Any, index: int = 1) -> np.ndarray:
    """Return an input of an operator, int32; empty if it is not a constant."""
    data = model.buffers[model.subgraphs[0].tensors[operator.inputs[index]].buffer].data
    return np.frombuffer(b"" if data is None else bytes(data), dtype=np.int32)


def _set_constant(model: Any, operator: Any, values: np.ndarray) -> None:
    """Replace the second input of an operator by a new constant; other operators may share the old one."""
    added = _add_constant(model, operator, values)
    operator.inputs = np.array([operator.inputs[0], added, *operator.inputs[2:]], dtype=np.int32)


def _add_constant(model: Any, operator: Any, values: np.ndarray) -> int:
    """Add a constant like the second input of an operator; return the index of its tensor."""
    tensors = model.subgraphs[0].tensors
    tensor, buffer = copy.copy(tensors[operator.inputs[1]]), copy.copy(model.buffers[0])
    buffer.data = np.frombuffer(values.astype(np.int32).tobytes(), dtype=np.uint8)
    tensor.shape, tensor.buffer = np.array(values.shape, dtype=np.int32), len(model.buffers)
    tensor.name = tensor.name + b":" + str(len(tensors)).encode()
    model.buffers.append(buffer)
    tensors.append(tensor)
    return len(tensors) - 1


def _slice_all_images(model: Any, operator: Any) -> None:
    """Replace a SLICE of one image by a STRIDED_SLICE of all images, because a SLICE has a fixed size."""
    from ai_edge_litert import schema_py_generated as schema

    begin, size = _constant(model, operator), _constant(model, operator, 2)
    if not len(begin) == len(size) > 0:
        return
    limits = model.subgraphs[0].tensors[operator.inputs[0]].shape
    end = np.where(size == -1, limits, begin + size)
    added = [_add_constant(model, operator, value) for value in (end, np.ones_like(begin))]
    operator.inputs = np.array([*operator.inputs[:2], *added], dtype=np.int32)
    code = copy.copy(model.operatorCodes[operator.opcodeIndex])
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.STRIDED_SLICE
    operator.opcodeIndex = len(model.operatorCodes)
    model.operatorCodes.append(code)
    operator.builtinOptionsType = schema.BuiltinOptions.StridedSliceOptions
    operator.builtinOptions = schema.StridedSliceOptionsT()
    operator.builtinOptions.beginMask = operator.builtinOptions.endMask = 1


def finish(folder: Path, precision: str) -> None:
    """Cast the weights to float16 with precision ``fp16``, and shorten the names of tensors.

    The name of a tensor contains those of all modules around each operator that was merged into one; in a small model,
    the names take more space than the weights.
    """
    from ai_edge_litert.tools import flatbuffer_utils

    path = folder / "model.tflite"
    if precision == "fp16":
        rule = {"regex": ".*", "operation": "*", "algorithm_key": "float_casting", "op_config": _FLOAT16}
        path.write_bytes(_quantized(folder, [rule], None))
    model = _read(path)
    for index, tensor in enumerate(model.subgraphs[0].tensors):
        modules = re.findall("<(.*?)>", tensor.name.decode().rpartition(";;")[2])
        if modules:
            tensor.name = f"{modules[-1]}:{index}".encode()
    path.write_bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def operators(folder: Path) -> None:
    """List the operators: name, kind, which inputs are constants, and the modules of each operator of PyTorch in it."""
    model = _read(folder / "model.tflite")
    graph = model.subgraphs[0]
    layers = []
    for operator in graph.operators:
        name = _name(graph, operator)
        layers.append(
            {
                "name": name,
                "kind": _kind(model, operator),
                "constants": [model.buffers[graph.tensors[index].buffer].data is not None for index in operator.inputs],
                "modules": [re.findall("<(.*?)>", part) for part in name.split(";;")],
            }
        )
    (folder / "operators.json").write_text(json.dumps(layers))


def calibrate(folder: Path) -> Iterator[None]:
    """Measure the minimum and maximum of each tensor, image by image."""
    from ai_edge_quantizer import calibrator, recipe, recipe_manager
    from ai_edge_quantizer.utils import qsv_utils

    rules = recipe_manager.RecipeManager()
    rules.load_quantization_recipe(recipe.static_wi8_ai8())
    # By default, the calibrator averages the minima and maxima of images.
    update = qsv_utils.min_max_update
    file = str(folder / "model.tflite")
    mode = calibrator.CalibrationMode.CALIBRATION_PRESERVE_ALL_TENSORS
    measured = calibrator.Calibrator(file, num_threads=1, mode=mode, qsv_update_func=update)
    for image in _images(_inputs(folder)):
        measured.calibrate({"serving_default": [image]}, rules)
        yield
    for limits in measured.get_model_qsvs().values():
        if limits and np.max(limits["max"]) == np.min(limits["min"]) == 0:
            limits["max"] += 1.0  # of ReLU without positive inputs: the interpreter rejects a scale of 0
    measured.save_calibration_result(str(folder / "ranges.json"))


def quantize(folder: Path, names: str) -> None:
    """Quantize operators; the others stay in float32."""
    rules = [_rule(content) for content in json.loads((folder / names).read_text())]
    (folder / "quantized.tflite").write_bytes(_quantized(folder, rules, _ranges(folder)))


def errors(folder: Path, names: str) -> Iterator[None]:
    """Compute 1 - mean cosine similarity of the features to float32 with each operator quantized by itself."""
    inputs, ranges = _inputs(folder), _ranges(folder)
    expected = _features((folder / "model.tflite").read_bytes(), inputs)
    error_of_layer = {}
    for operator in json.loads((folder / names).read_text()):
        features = _features(_quantized(folder, [_rule(operator)], ranges), inputs)
        error_of_layer[operator["name"]] = 1 - _mean_cosine(expected, features)
        yield
    (folder / "errors.json").write_text(json.dumps(error_of_layer))


def run(folder: Path) -> None:
    """Compute the features of images: at once, if the file takes batches, and otherwise one by one."""
    np.save(folder / "features.npy", _features((folder / "model.tflite").read_bytes(), _inputs(folder)))


def _read(path: Path) -> Any:
    from ai_edge_litert.tools import flatbuffer_utils

    return flatbuffer_utils.read_model(str(path))


def _kind(model: Any, operator: Any) -> str:
    """Return the name of the kind of an operator, e.g. CONV_2D."""
    from ai_edge_litert import schema_py_generated as schema

    code = model.operatorCodes[operator.opcodeIndex].builtinCode
    return str(next(name for name, value in vars(schema.BuiltinOperator).items() if value == code))


def _name(graph: Any, operator: Any) -> str:
    """Return the name by which the rules of the quantizer select an operator."""
    from ai_edge_quantizer.utils import tfl_flatbuffer_utils

    return str(tfl_flatbuffer_utils.get_op_scope(operator, graph.tensors))


def _rule(operator: dict[str, Any]) -> dict[str, Any]:
    return {
        "regex": f"^{re.escape(operator['name'])}$",
        "operation": operator["kind"],
        "algorithm_key": "min_max_uniform_quantize",
        "op_config": _INT8,
    }


def _quantized(folder: Path, rules: list[dict[str, Any]], ranges: Any) -> bytes:
    from ai_edge_quantizer import quantizer

    quantized = quantizer.Quantizer(str(folder / "model.tflite"), rules)
    content = quantized.quantize(ranges, enable_progress_bar=False, enable_progress_report=False).quantized_model
    return bytes(content)


def _ranges(folder: Path) -> Any:
    from ai_edge_quantizer.utils import calibration_utils

    return calibration_utils.load_calibration_results(str(folder / "ranges.json"))[0]


def _inputs(folder: Path) -> Inputs:
    with np.load(folder / "inputs.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _images(inputs: Inputs) -> Iterator[Inputs]:
    """Split a batch into its images; int64 becomes int32, as in the files."""
    for i in range(len(inputs["images"])):
        yield {name: _converted(values[i : i + 1]) for name, values in inputs.items()}


def _converted(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32) if values.dtype == np.int64 else values


def _features(content: bytes, inputs: Inputs) -> np.ndarray:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content, num_threads=1)
    signature = interpreter.get_signature_runner()
    takes_batches = interpreter.get_input_details()[0]["shape_signature"][0] == -1
    batches = [{name: _converted(values) for name, values in inputs.items()}] if takes_batches else _images(inputs)
    rows = []
    for batch in batches:
        (features,) = signature(**batch).values()
        rows.append(features.copy())  # the next call overwrites the output
    return np.concatenate(rows)


def _mean_cosine(expected: np.ndarray, actual: np.ndarray) -> float:
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    return float(np.mean((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))))


COMMANDS: dict[str, Callable[..., Any]] = {
    command.__name__: command for command in (convert, finish, operators, calibrate, quantize, errors, run)
}


def main(command: str, folder: str, *arguments: str) -> None:
    """Execute a command."""
    steps = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the libraries write messages to stdout
    try:
        for _ in COMMANDS[command](Path(folder), *arguments) or ():
            print("step", file=steps)
    except Exception as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines()]
        operator = next((line for line in lines if line.startswith("While executing")), "")
        sys.exit(f"{type(error).__name__}: {next(filter(None, lines), '')} {operator}".strip())


if __name__ == "__main__":
    main(*sys.argv[1:])
