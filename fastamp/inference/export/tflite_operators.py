"""Operators of a TFLite file: their modules, names, and a batch size that is free."""

import copy
import re
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Operator:
    """Operator of a TFLite file.

    Attributes:
        name: name by which ai-edge-quantizer selects it.
        kind: e.g. CONV_2D.
        constants: which inputs are constants.
        modules: for each operator of PyTorch in it, the names of its modules, from the outside.
    """

    name: str
    kind: str
    constants: list[bool]
    modules: list[list[str]]


def operators_of(content: bytes) -> list[Operator]:
    """List the operators of a file."""
    from ai_edge_litert.tools import flatbuffer_utils
    from ai_edge_quantizer.utils import tfl_flatbuffer_utils

    model = flatbuffer_utils.read_model_from_bytearray(content)
    graph = model.subgraphs[0]
    operators = []
    for operator in graph.operators:
        name = str(tfl_flatbuffer_utils.get_op_scope(operator, graph.tensors))
        kind = flatbuffer_utils.opcode_to_name(model, operator.opcodeIndex)
        constants = [model.buffers[graph.tensors[index].buffer].data is not None for index in operator.inputs]
        operators.append(Operator(name, kind, constants, [re.findall("<(.*?)>", part) for part in name.split(";;")]))
    return operators


def with_short_names(content: bytes) -> bytes:
    """Shorten the names of tensors.

    The name of a tensor contains those of all modules around each operator that was merged into one; in a small model,
    the names take more space than the weights.
    """
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model_from_bytearray(content)
    for index, tensor in enumerate(model.subgraphs[0].tensors):
        modules = re.findall("<(.*?)>", tensor.name.decode().rpartition(";;")[2])
        if modules:
            tensor.name = f"{modules[-1]}:{index}".encode()
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


def with_free_batch_size(content: bytes) -> bytes:
    """Free the first size of inputs, outputs and RESHAPE operators if it is 1.

    MEAN operators that average over it too, of instance norm, average each image by itself. At batch size 1 the two
    files are equal. Others are possible if no other operator has the batch size as a constant.
    """
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model_from_bytearray(content)
    (graph,) = model.subgraphs
    for operator in graph.operators:
        kind = flatbuffer_utils.opcode_to_name(model, operator.opcodeIndex)
        if kind == "RESHAPE":
            values = _constant(model, operator)
            if values.size and values[0] == 1 and -1 not in values:
                _set_constant(model, operator, np.array([-1, *values[1:]]))
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
    return bytes(flatbuffer_utils.convert_object_to_bytearray(model))


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
