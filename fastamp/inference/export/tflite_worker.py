"""Convert a program of torch.export to TFLite. Executed by the Python of an environment with litert-torch, not fastamp.

usage: python -I tflite_worker.py FOLDER      model.pt2 -> model.tflite, for one image
"""

import sys
import traceback
from pathlib import Path

import litert_torch
import torch


def convert(folder: Path) -> None:
    """Convert a program of torch.export; the names of operators have the names of the modules."""
    program = torch.export.load(folder / "model.pt2")
    module = torch.export.unflatten(program)
    for name, part in module.named_modules():  # the converter names operators after classes
        part.__class__ = type(f"<{name}>", (type(part),), {})
    examples = {name: images[:1] for name, images in program.example_inputs[1].items()}
    litert_torch.convert(module.eval(), sample_kwargs=examples).export(str(folder / "model.tflite"))


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines()]
        operator = next((line for line in lines if line.startswith("While executing")), "")
        sys.exit(f"{type(error).__name__}: {next(filter(None, lines), '')} {operator}".strip())
