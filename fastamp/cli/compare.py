"""Say how alike two images are, and where that stands among the model's genuine and impostor pairs."""

import argparse
import json

from fastamp.cli.model_arguments import add_model_arguments, add_place_arguments, predictor_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("images", nargs=2, metavar="IMAGE")
    parser.add_argument(
        "--reference",
        metavar="FILE.npz",
        help="an extraction of images with identities, whose pairs are taken (default: those in the checkpoint)",
    )
    add_place_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; the shares are of pairs that are less alike")


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    comparison = predictor_of(args).compare(
        *args.images, reference=args.reference, camids=args.camids, viewids=args.viewids
    )
    if args.json:
        fractions = {"genuine_share": comparison.genuine_fraction, "impostor_share": comparison.impostor_fraction}
        print(
            json.dumps(
                {"score": comparison.score, "metric": comparison.metric, **fractions, "source": comparison.source}
            )
        )
    else:
        print(comparison.describe())
    return 0
