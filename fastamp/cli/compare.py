"""Compute the similarity of two images, and its percentiles among pairs of the same and of different identities.

A calibrated model (`fastamp calibrate`) also decides whether they show the same identity or different ones, or whether
this is unknown.

examples:
  fastamp compare logs/run a.jpg b.jpg
  fastamp compare logs/run/model_best.pth a.jpg b.jpg --json TEST.METRIC=cosine
"""

import argparse
import json
import logging

from fastamp.cli.model_arguments import EXPORTED_HELP, add_camera_view_arguments, add_model_arguments, model_of
from fastamp.cli.options import add_key_values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser, EXPORTED_HELP)
    parser.add_argument("images", nargs=2, metavar="IMAGE", help="image files")
    parser.add_argument(
        "--reference",
        metavar="FILE.npz",
        help="output of `fastamp extract` with identities, for the percentiles (default: pairs in the checkpoint)",
    )
    add_camera_view_arguments(parser)
    add_key_values(parser, dest="key_values")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON; genuine_share and impostor_share are the fractions of such pairs that are less similar",
    )


def run(args: argparse.Namespace) -> int:
    """Compare two images and print the result."""
    logger = logging.getLogger("fastamp")
    level = logger.level
    logger.setLevel(logging.WARNING)  # the result is two lines; those of the loading would hide it
    try:
        comparison = model_of(args, args.key_values).compare(
            *args.images, reference=args.reference, camids=args.camids, viewids=args.viewids, modality=args.modality
        )
    finally:
        logger.setLevel(level)
    if args.json:
        fractions = {"genuine_share": comparison.genuine_fraction, "impostor_share": comparison.impostor_fraction}
        fields = {"score": comparison.score, "metric": comparison.metric, **fractions, "source": comparison.source}
        if calibration := comparison.calibration:
            fields |= {"decision": comparison.decision, "probability": comparison.probability}
            fields |= {"same_threshold": calibration.same_threshold, "far": calibration.far}
            fields |= {"different_threshold": calibration.different_threshold, "frr": calibration.frr}
        print(json.dumps(fields))
    else:
        print(comparison.describe())
    return 0
