"""Convert and run TFLite files. Executed by the Python of an environment with litert-torch, which may lack fastamp.

usage:
  python tflite_worker.py convert MODEL.pt2 MODEL.tflite PRECISION INPUTS
  python tflite_worker.py run MODEL.tflite < images > features

INPUTS is JSON: name -> [shape, name of a PyTorch dtype]. On stdin and stdout are .npz and .npy files.
"""

import io
import json
import sys

import numpy as np


def convert(source: str, output: str, precision: str, inputs: str) -> None:
    """Convert a program of torch.export; with precision ``fp16``, its weights are cast to float16."""
    import litert_torch
    import torch

    program = torch.export.load(source).module()

    class Network(torch.nn.Module):  # litert-torch calls eval(), which the module of a program does not support
        def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
            features: torch.Tensor = program(**tensors)
            return features

    types = json.loads(inputs).items()
    examples = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in types}
    litert_torch.convert(Network().eval(), sample_kwargs=examples).export(output)
    if precision == "fp16":
        _cast_weights(output)


def _cast_weights(path: str) -> None:
    from ai_edge_quantizer import quantizer

    weights = {"num_bits": 16, "dtype": "FLOAT", "symmetric": True, "granularity": "TENSORWISE", "block_size": 0}
    config = {"weight_tensor_config": weights, "compute_precision": "FLOAT", "explicit_dequantize": True}
    rule = {"regex": ".*", "operation": "*", "algorithm_key": "float_casting", "op_config": config}
    found = quantizer.Quantizer(path, [rule]).quantize().quantized_model
    with open(path, "wb") as file:
        file.write(found)


def run(path: str) -> None:
    """Compute the features of images, one by one, because the batch size of a file is 1."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path, num_threads=1)
    signature = interpreter.get_signature_runner()
    types = {name: details["dtype"] for name, details in signature.get_input_details().items()}
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as arrays:
        inputs = {name: arrays[name].astype(dtype) for name, dtype in types.items()}
    rows = []
    for i in range(len(inputs["images"])):
        (features,) = signature(**{name: values[i : i + 1] for name, values in inputs.items()}).values()
        rows.append(features.copy())
    content = io.BytesIO()
    np.save(content, np.concatenate(rows))
    sys.stdout.buffer.write(content.getvalue())


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        run(*sys.argv[2:])
