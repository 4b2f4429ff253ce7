"""Arguments of commands that use a trained model."""

import argparse
from typing import TYPE_CHECKING

from fastamp.utils.errors import ConfigError
from fastamp.utils.moved import moved_names

if TYPE_CHECKING:
    from fastamp.inference import Predictor

__getattr__ = moved_names(__name__, {"add_place_arguments": "fastamp.cli.model_arguments.add_camera_view_arguments"})


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments CHECKPOINT, --device and --opts."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a run, e.g. logs/run/model_best.pth")
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="config keys and values that override the config of the checkpoint",
    )


def add_camera_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments --camids and --viewids."""
    for name in ("camids", "viewids"):
        help_ = f"one per image, for a model with {'camera' if name == 'camids' else 'view'} embeddings"
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=help_)


def predictor_of(args: argparse.Namespace) -> "Predictor":
    """Create a ``Predictor`` from the arguments that ``add_model_arguments`` added.

    Raises:
        ConfigError: if ``--opts`` has a key without a value.
    """
    from fastamp.inference import Predictor

    if len(args.opts) % 2:
        raise ConfigError(
            f"--opts: expected KEY VALUE pairs, got {' '.join(args.opts)}.\n  fix: add a value after the last key"
        )
    return Predictor(args.checkpoint, device=args.device, opts=args.opts)
