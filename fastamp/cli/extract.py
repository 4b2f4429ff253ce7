"""Write the features of a folder, a CSV file or a data set to one .npz file; killed, it goes on where it was."""

import argparse

from fastamp.cli.model_arguments import add_model_arguments, predictor_of

SPLITS = ("query", "gallery", "train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "source", metavar="SOURCE", help="a folder, a CSV file, or a name as in DATASETS.NAMES (Demo, folder:FOLDER)"
    )
    parser.add_argument("--output", "-o", required=True, metavar="OUT.npz", help="its parts are kept in OUT.npz.parts")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS, help="of a data set (default: all)")
    parser.add_argument("--skip-corrupt", action="store_true", help="leave out, and list, images that cannot be read")
    parser.add_argument("--workers", type=int, help="processes that decode (default: the config's TEST.NUM_WORKERS)")


def run(args: argparse.Namespace) -> int:
    """Extract, and print what was written."""
    from fastamp.inference.extract import extract

    extraction, left_out = extract(
        predictor_of(args),
        args.source,
        args.output,
        splits=args.splits,
        skip_corrupt=args.skip_corrupt,
        num_workers=args.workers,
    )
    count, width = extraction.features.shape
    if left_out:
        print(f"left out {len(left_out)} images:", *left_out, sep="\n  ")
    print(f"wrote {extraction.path}: {count} features of {width}, model {extraction.config_hash}")
    return 0
