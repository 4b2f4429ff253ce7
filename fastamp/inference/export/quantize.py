"""Static int8 quantization of exported models by QuantizeLinear and DequantizeLinear nodes.

Weights are int8 with one scale for each output channel, because one scale for a whole tensor loses narrow channels,
e.g. of OSNet's depthwise convolutions; those of the first convolution have 7 bits. Activations are uint8 with one scale
and one zero point, from the minimum and the maximum over the calibration images (Jacob et al. 2018, arXiv:1712.05877,
sec. 2). The head, the normalization of images, instances and layers, attention, and the layers with the largest errors
stay in float32.
"""

import ast
import copy
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from fastamp.inference.export.onnx_format import onnx_model
from fastamp.inference.export.quiet import ExportError, quiet
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import Session, open_onnx
from fastamp.modeling.meta_arch.image_model import ImageModel
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

PROBED_IMAGES = 16
"""Number of calibration images with which errors are measured."""
_WEIGHTED = ("Conv", "MatMul", "Gemm")
_OPERATORS = (*_WEIGHTED, "Relu", "Clip", "Add", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool")
_SATURATION = {"HardSwish": (-3.0, np.inf), "HardSigmoid": (-3.0, 3.0)}
"""Operator -> interval outside of which its inputs have the outputs of the ends of the interval."""
MAX_ERROR = 0.005
"""Layers stay in float32 until the error, 1 - cosine similarity of features, is estimated to be at most this."""
MAX_FLOAT = 0.25
"""Largest fraction of the layers that stay in float32."""


def quantize(source: Source, inputs: Sequence[dict[str, Tensor]]) -> tuple[Any, list[str]]:
    """Convert a module to an int8 ONNX model.

    All layers of the trunks are quantized. If the mean cosine similarity of features to float32 is then less than
    1 - ``MAX_ERROR``, each layer is quantized by itself to measure its error, and those with the largest errors stay in
    float32, at most a fraction ``MAX_FLOAT``.

    Args:
        source: module to export.
        inputs: inputs of the module for the calibration images, in batches.

    Returns:
        ONNX model, and names of the layers of the trunks that stay in float32 because of their errors.

    Raises:
        ExportError: if the model cannot be converted.
    """
    model = onnx_model(source)
    nodes = {node.name: node for node in _trunk_nodes(model, source)}
    ranges = _activation_ranges(model, inputs)
    layers = {name: _title(node) for name, node in nodes.items() if node.op_type in (*_WEIGHTED, "Add")}
    # The sum of two products of bright pixels and large weights exceeds the 16 bits of x86 CPUs without VNNI.
    first = [node.input[1] for node in nodes.values() if node.op_type == "Conv"][:1]
    return quantize_layers(
        model,
        nodes,
        layers,
        lambda names: _quantized(model, names, ranges, first),
        lambda quantized: open_onnx(quantized.SerializeToString()),
        inputs,
    )


def quantize_layers(
    model: Any,
    names: Collection[str],
    layers: Mapping[str, str],
    quantized: Callable[[Collection[str]], Any],
    opened: Callable[[Any], Session],
    inputs: Sequence[dict[str, Tensor]],
) -> tuple[Any, list[str]]:
    """Quantize a model, except for the layers with the largest errors if the error is larger than ``MAX_ERROR``.

    Args:
        model: model in float32, of any format.
        names: names of the operators that can be quantized.
        layers: names of those whose errors are measured -> titles.
        quantized: function (names of operators) -> model in which these are quantized.
        opened: function (model) -> session.
        inputs: inputs of the model for the calibration images, in batches.

    Returns:
        The quantized model, and the titles of the layers that stay in float32.

    Raises:
        ExportError: if no operator can be quantized.
    """
    if not names:
        raise ExportError("int8 export found no layers to quantize.\n  fix: use --precision fp16")
    probe = {name: tensor[:PROBED_IMAGES] for name, tensor in inputs[0].items()}
    expected = opened(model).run_tensors(probe).double()

    def error_of(changed: Any) -> float:
        return 1 - F.cosine_similarity(expected, opened(changed).run_tensors(probe).double()).mean().item()

    result = quantized(names)
    error = error_of(result)
    if error <= MAX_ERROR:
        return result, []
    errors = {name: error_of(quantized([name])) for name in track(layers, len(layers), "errors of layers")}
    selected = largest_errors(errors, MAX_ERROR / error, MAX_FLOAT)
    kept = [title for name, title in layers.items() if name in selected]
    logger.info(
        "%d of %d layers stay in float32, because in int8 they change the features too much: %s",
        len(kept),
        len(errors),
        ", ".join(kept[:5]) + (", ..." if len(kept) > 5 else ""),
    )
    return quantized([name for name in names if name not in selected]), kept


def trunks_of(source: Source) -> set[str]:
    """Return the names of the trunks of the models in a module."""
    return {
        ".".join(filter(None, (name, trunk)))
        for name, module in source.module.named_modules()
        if isinstance(module, ImageModel)
        for trunk in module.trunks
    }


def _trunk_nodes(model: Any, source: Source) -> list[Any]:
    """Return the nodes of the trunks that can be quantized; products of two activations, as in attention, cannot."""
    trunks = trunks_of(source)
    constants = {tensor.name for tensor in model.graph.initializer}
    return [
        node
        for node in model.graph.node
        if node.op_type in _OPERATORS
        and (node.op_type not in _WEIGHTED or node.input[1] in constants)
        and not trunks.isdisjoint(_scopes(node))
    ]


def _scopes(node: Any) -> list[str]:
    """Return the names of the modules that contain an ONNX node of PyTorch's exporter, from the outside."""
    entries = {entry.key: entry.value for entry in node.metadata_props}
    scopes: list[str] = ast.literal_eval(entries.get("pkg.torch.onnx.name_scopes", "[]"))
    return scopes


def _title(node: Any) -> str:
    """Return the name of the layer of an ONNX node: that of its weights if they have one, otherwise of its module."""
    if node.op_type in _WEIGHTED and node.input[1].endswith(".weight"):
        return str(node.input[1].removesuffix(".weight"))
    return f"{node.op_type} in {_scopes(node)[-2]}"


def _activation_ranges(model: Any, inputs: Sequence[dict[str, Tensor]]) -> Any:
    """Measure the minimum and maximum of each activation."""
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.SerializeToString())
        with quiet("onnxruntime cannot calibrate the model"):
            calibrator = create_calibrator(
                path,
                list(_OPERATORS),
                augmented_model_path=os.fspath(path.with_name("augmented.onnx")),
                calibrate_method=CalibrationMethod.MinMax,
            )
        for batch in track(inputs, len(inputs), "calibrating"):
            arrays = {name: tensor.numpy() for name, tensor in batch.items()}
            reader = SimpleNamespace(get_next=partial(next, iter([arrays]), None))
            with quiet("onnxruntime cannot calibrate the model"):
                calibrator.collect_data(reader)  # merges the ranges with those of earlier batches
        return _saturated(model, calibrator.compute_data())


def _saturated(model: Any, ranges: Any) -> Any:
    """Limit the range of each tensor that is only the input of an operator in ``_SATURATION``, for smaller steps."""
    from onnxruntime.quantization.calibrate import TensorData

    readers = Counter(tensor for node in model.graph.node for tensor in node.input)
    for node in model.graph.node:
        if node.op_type in _SATURATION and readers[node.input[0]] == 1 and node.input[0] in ranges.data:
            limits = _SATURATION[node.op_type]
            low, high = (np.clip(bound, *limits).astype(np.float32) for bound in ranges[node.input[0]].range_value)
            ranges.data[node.input[0]] = TensorData(lowest=low, highest=high)
    return ranges


def _quantized(model: Any, names: Collection[str], ranges: Any, reduced: Sequence[str]) -> Any:
    """Return a copy of an ONNX model with int8 weights, those ``reduced`` of 7 bits, and Q/DQ nodes for some nodes."""
    from onnxruntime.quantization import QDQQuantizer, QuantType

    bits7 = {"axis": 0, "quant_type": QuantType.QInt8, "symmetric": True, "reduce_range": True}
    options: dict[str, Any] = {"TensorQuantOverrides": {name: [bits7] for name in reduced}}
    if len(names) == 1:  # the next node rounds the output, often after an activation function
        options["OpTypesToExcludeOutputQuantization"] = _WEIGHTED
    with quiet("onnxruntime cannot quantize the model"):
        quantizer = QDQQuantizer(
            copy.deepcopy(model),
            True,  # weights: one scale for each output channel
            False,  # all 8 bits
            QuantType.QInt8,
            QuantType.QUInt8,
            ranges,
            list(names),
            [],
            list(_OPERATORS),
            options,
        )
        quantizer.quantize_model()
        return quantizer.model.model


def largest_errors(errors: dict[str, float], fraction: float, most: float) -> list[str]:
    """Select the layers with the largest errors, so that the others have at most a fraction of the sum of all errors.

    The sum over layers quantized by themselves differs from the error of a model in which all are quantized, because
    neighbors round the same tensor; a fraction is independent of this.

    Args:
        errors: error of each layer.
        fraction: largest fraction of the sum that remains.
        most: largest fraction of the layers that is selected.
    """
    names = sorted(errors, key=lambda name: errors[name], reverse=True)
    remaining = np.cumsum([errors[name] for name in reversed(names)])[::-1]  # if all before a layer are selected
    count = int(np.count_nonzero(remaining > fraction * sum(errors.values())))
    return names[: min(count, int(most * len(names)))]
