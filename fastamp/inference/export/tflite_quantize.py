"""Static int8 quantization of TFLite files by ai-edge-quantizer.

As in ``quantize``, but activations are int8, all weights have 8 bits, because the sums of the interpreter do not
saturate, and the ranges before hard-swish and hard-sigmoid are not limited.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastamp.inference.export.quantize import MAX_ERROR, NO_LAYERS, PROBED_IMAGES, error_of, sensitive_layers, trunks_of
from fastamp.inference.export.quiet import ExportError
from fastamp.inference.export.tflite_format import convert, features, run_worker, write_inputs
from fastamp.inference.export.trace import Source

_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_JOINING = ("ADD", "CONCATENATION")
_OTHERS = ("PAD", "RELU", "MAX_POOL_2D", "AVERAGE_POOL_2D")

Operator = dict[str, Any]
"""Operator of a TFLite file, from the worker's ``operators``."""


def quantize(source: Source, inputs: Sequence[dict[str, Tensor]]) -> tuple[bytes, list[str]]:
    """Convert a module to an int8 TFLite file; see ``quantize.quantize``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(source, folder)
        run_worker("operators", folder)
        all_operators: list[Operator] = json.loads((folder / "operators.json").read_text())
        trunks = trunks_of(source)
        operators = [operator for operator in all_operators if _is_quantizable(operator, trunks)]
        if not operators:
            raise ExportError(NO_LAYERS)
        images = {key: torch.cat([batch[key] for batch in inputs]) for key in inputs[0]}
        write_inputs(folder, images)
        run_worker("calibrate", folder, steps=len(images["images"]), title="calibrating")
        model = _quantized(folder, operators)
        probe = {key: values[:PROBED_IMAGES] for key, values in images.items()}
        expected = features((folder / "model.tflite").read_bytes(), probe)
        error = error_of(expected, features(model, probe))
        if error <= MAX_ERROR:
            return model, []
        layers = [operator for operator in operators if operator["kind"] in (*_WEIGHTED, "ADD")]
        write_inputs(folder, probe)
        _write_names(folder, layers)
        run_worker("errors", folder, "names.json", steps=len(layers), title="errors of layers")
        errors = json.loads((folder / "errors.json").read_text())
        weighted = {key.rpartition(".")[0] for key in source.module.state_dict() if key.rpartition(".")[2] == "weight"}
        kept = sensitive_layers(errors, error, {layer["name"]: _title(layer, weighted) for layer in layers})
        quantized = [operator for operator in operators if operator["name"] not in kept]
        return _quantized(folder, quantized), list(kept.values())


def _is_quantizable(operator: Operator, trunks: set[str]) -> bool:
    """Return True for operators of the trunks with constant weights, or without constants except for sizes."""
    kind, constants = operator["kind"], operator["constants"]
    if any(trunks.isdisjoint(modules) for modules in operator["modules"]):
        return False
    if kind in _WEIGHTED:
        return bool(constants[1])
    return kind in _OTHERS or (kind in _JOINING and not any(constants))


def _title(operator: Operator, weighted: set[str]) -> str:
    """Return the name of the layer of an operator: that of its weights if they have one, otherwise of its module."""
    innermost = [modules[-1] for modules in reversed(operator["modules"]) if modules]
    if operator["kind"] in _WEIGHTED:
        return str(next((name for name in innermost if name in weighted), innermost[0]))
    return f"{operator['kind'].title()} in {min(innermost, key=len)}"


def _quantized(folder: Path, operators: Sequence[Operator]) -> bytes:
    _write_names(folder, operators)
    run_worker("quantize", folder, "names.json")
    return (folder / "quantized.tflite").read_bytes()


def _write_names(folder: Path, operators: Sequence[Operator]) -> None:
    (folder / "names.json").write_text(json.dumps(operators))
