"""The arguments of commands that use a trained model."""

import argparse
from typing import TYPE_CHECKING

from fastamp.utils.errors import ConfigError

if TYPE_CHECKING:
    from fastamp.inference import Predictor


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CHECKPOINT, --device and --opts."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="what training wrote, e.g. logs/x/model_best.pth")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument("--opts", nargs="+", default=[], metavar="KEY VALUE", help="over the checkpoint's config")


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --camids and --viewids."""
    for name in ("camids", "viewids"):
        help_ = f"one for each image, for a model with embeddings of {name}"
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=help_)


def predictor_of(args: argparse.Namespace) -> "Predictor":
    """Return the model that these arguments name.

    Raises:
        UserError: see ``Predictor``.
    """
    from fastamp.inference import Predictor

    if len(args.opts) % 2:
        raise ConfigError(f"--opts: a key without a value among {' '.join(args.opts)}")
    return Predictor(args.checkpoint, device=args.device, opts=args.opts)
