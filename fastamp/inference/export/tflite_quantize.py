"""Static int8 quantization of TFLite files by ai-edge-quantizer.

As in ``quantize``, but activations are int8, all weights have 8 bits, because the sums of the interpreter do not
saturate, and the ranges before hard-swish and hard-sigmoid are not limited.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.inference.export.quantize import quantize_layers, trunks_of
from fastamp.inference.export.quiet import quiet
from fastamp.inference.export.tflite_format import convert
from fastamp.inference.export.tflite_operators import Operator, operators_of
from fastamp.inference.export.trace import Source
from fastamp.inference.sessions import open_tflite
from fastamp.utils.progress import track

_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_JOINING = ("ADD", "CONCATENATION")
_OTHERS = ("PAD", "RELU", "MAX_POOL_2D", "AVERAGE_POOL_2D")


def quantize(source: Source, inputs: Sequence[dict[str, Tensor]]) -> tuple[bytes, list[str]]:
    """Convert a module to an int8 TFLite file; see ``quantize.quantize``."""
    from ai_edge_quantizer import Quantizer

    model = convert(source)
    trunks = trunks_of(source)
    operators = {operator.name: operator for operator in operators_of(model) if _is_quantizable(operator, trunks)}
    weighted = {key.rpartition(".")[0] for key in source.module.state_dict() if key.rpartition(".")[2] == "weight"}
    layers = {
        name: _title(operator, weighted) for name, operator in operators.items() if operator.kind in (*_WEIGHTED, "ADD")
    }
    ranges = _activation_ranges(model, inputs)

    def quantized(names: Collection[str]) -> bytes:
        quantizer = Quantizer(model)
        with quiet("ai-edge-quantizer cannot quantize the model"):
            for name in names:
                quantizer.add_static_config(f"^{re.escape(name)}$", operators[name].kind, 8, 8)
            result = quantizer.quantize(ranges, enable_progress_bar=False, enable_progress_report=False)
        return bytes(result.quantized_model)

    return quantize_layers(model, operators, layers, quantized, open_tflite, inputs)


def _activation_ranges(model: bytes, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Measure the minimum and maximum of each tensor, image by image."""
    from ai_edge_quantizer import calibrator, recipe, recipe_manager
    from ai_edge_quantizer.utils import qsv_utils

    rules = recipe_manager.RecipeManager()
    rules.load_quantization_recipe(recipe.static_wi8_ai8())
    # By default, the calibrator averages the minima and maxima of images.
    measured = calibrator.Calibrator(model, num_threads=1, qsv_update_func=qsv_utils.min_max_update)
    images = {name: torch.cat([batch[name] for batch in inputs]) for name in inputs[0]}
    arrays = {name: (values if name == "images" else values.int()).numpy() for name, values in images.items()}
    for row in track(range(len(images["images"])), len(images["images"]), "calibrating"):
        with quiet("ai-edge-quantizer cannot calibrate the model"):
            measured.calibrate({"serving_default": [{k: values[row : row + 1] for k, values in arrays.items()}]}, rules)
    ranges: dict[str, Any] = measured.get_model_qsvs()
    for limits in ranges.values():
        if limits and np.max(limits["max"]) == np.min(limits["min"]) == 0:
            limits["max"] += 1.0  # of ReLU without positive inputs: the interpreter rejects a scale of 0
    return ranges


def _is_quantizable(operator: Operator, trunks: set[str]) -> bool:
    """Return True for operators of the trunks with constant weights, or without constants except for sizes."""
    if any(trunks.isdisjoint(modules) for modules in operator.modules):
        return False
    if operator.kind in _WEIGHTED:
        return operator.constants[1]
    return operator.kind in _OTHERS or (operator.kind in _JOINING and not any(operator.constants))


def _title(operator: Operator, weighted: set[str]) -> str:
    """Return the name of the layer of an operator: that of its weights if they have one, otherwise of its module."""
    innermost = [modules[-1] for modules in reversed(operator.modules) if modules]
    if operator.kind in _WEIGHTED:
        return next((name for name in innermost if name in weighted), innermost[0])
    return f"{operator.kind.title()} in {min(innermost, key=len)}"
