#!/usr/bin/env python
"""Convert a TorchScript archive of OpenAI's CLIP to a weights file, without executing code of the archive."""

import argparse
import sys
from pathlib import Path

from fastamp.checkpoint.torchscript_file import read_torchscript
from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.engine import run_command_line

_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")


def convert(source: str, target: str) -> int:
    """Write the float32 tensors of ``source``, e.g. ViT-B-16.pt, to ``target``, and return their number.

    Raises:
        WeightsError: if ``source`` is not a TorchScript archive.
        WriteError: if ``target`` cannot be written.
    """
    tensors = {key: value for key, value in read_torchscript(source).items() if key not in _NOT_WEIGHTS}
    state = {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}
    write_checkpoint(Path(target), state)
    return len(state)


def main(options: argparse.Namespace) -> None:
    """Convert the archive."""
    print(f"wrote {convert(options.source, options.target)} tensors to {options.target}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="archive, e.g. ViT-B-16.pt or RN50.pt")
    parser.add_argument("target", help="weights file to write, e.g. clip_vit_b16.pth")
    arguments = parser.parse_args()
    sys.exit(run_command_line(lambda: main(arguments)))
