"""Convert a TorchScript archive of OpenAI's CLIP to a weights file, without executing code of the archive.

examples:
  fastamp convert-clip ViT-B-16.pt clip_vit_b16.pth
"""

import argparse
from pathlib import Path

_NOT_WEIGHTS = ("input_resolution", "context_length", "vocab_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("source", help="archive, e.g. ViT-B-16.pt or RN50.pt")
    parser.add_argument("target", help="weights file to write, e.g. clip_vit_b16.pth")


def run(args: argparse.Namespace) -> int:
    """Convert the archive."""
    print(f"wrote {convert(args.source, args.target)} tensors to {args.target}")
    return 0


def convert(source: str, target: str) -> int:
    """Write the float32 tensors of ``source``, e.g. ViT-B-16.pt, to ``target``, and return their number.

    Raises:
        WeightsError: if ``source`` is not a TorchScript archive.
        WriteError: if ``target`` cannot be written.
    """
    from fastamp.checkpoint.torchscript_file import read_torchscript
    from fastamp.checkpoint.weights_file import write_checkpoint

    tensors = {key: value for key, value in read_torchscript(source).items() if key not in _NOT_WEIGHTS}
    state = {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}
    write_checkpoint(Path(target), state)
    return len(state)
