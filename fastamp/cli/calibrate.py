"""Choose thresholds for decisions on unknown identities, and write them to a copy of the checkpoint.

`fastamp compare` then decides same, different or unknown, and `fastamp search` answers unknown for a query whose best
match is below the threshold. A random part of the test identities chooses the thresholds, the others measure the error
rates.

examples:
  fastamp calibrate logs/run --data Market1501 --far 0.001
  fastamp calibrate logs/run/model_best.pth --data csv:mine.csv --far 0.01 --fpir 0.1 --in-place
"""

import argparse

from fastamp.cli.model_arguments import add_model_arguments, predictor_of
from fastamp.cli.options import add_key_values, at_least, dataset_argument
from fastamp.utils.choices import PROBABILITY_METHODS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        required=True,
        metavar="SET",
        help="dataset whose test identities were not used for training, as in DATASETS.TESTS",
    )
    for name, default, meaning in (
        ("far", 0.001, "false accept rate: pairs of different identities declared the same"),
        ("frr", 0.05, "false reject rate: pairs of the same identity declared different"),
        ("fpir", 0.05, "false-positive identification rate: queries without a match whose best match is accepted"),
    ):
        help_ = f"wanted {meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=float, default=default, metavar="RATE", help=help_)
    parser.add_argument(
        "--method",
        choices=PROBABILITY_METHODS,
        default="isotonic",
        help="method of the probabilities (default: %(default)s)",
    )
    parser.add_argument(
        "--fraction",
        type=float,
        default=0.5,
        help="fraction of the identities that chooses the thresholds; the others measure the rates (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--gallery-size", type=at_least(1), metavar="N", help="number of gallery images for --fpir (default: all)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the random parts (default: %(default)s)")
    parser.add_argument(
        "--output", "-o", metavar="OUT", help="output file (default: CHECKPOINT_calibrated.pth in the same folder)"
    )
    parser.add_argument("--in-place", action="store_true", help="write to the checkpoint itself")
    add_key_values(parser, dest="key_values")


def run(args: argparse.Namespace) -> int:
    """Calibrate the model, print the thresholds and write the checkpoint."""
    from fastamp.inference.calibration import calibrate_model, check_calibrated_output, write_calibrated

    predictor = predictor_of(args, args.key_values)
    check_calibrated_output(predictor.checkpoint, args.output, in_place=args.in_place)
    with dataset_argument("--data"):
        calibration = calibrate_model(
            predictor,
            args.data,
            far=args.far,
            frr=args.frr,
            fpir=args.fpir,
            method=args.method,
            fraction=args.fraction,
            gallery_size=args.gallery_size,
            seed=args.seed,
        )
    print(calibration.describe())
    print(f"wrote {write_calibrated(predictor.checkpoint, calibration, args.output, in_place=args.in_place)}")
    return 0
