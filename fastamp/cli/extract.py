"""Extract features from the images of a folder, a CSV file or a dataset to one .npz, .csv or .parquet file.

To continue an interrupted extraction, run the same command again.

examples:
  fastamp extract logs/run/model_best.pth images/ -o features.npz
  fastamp extract logs/run/model_best.pth Market1501 -o gallery.npz --splits gallery
  fastamp extract logs/run/model_best.pth csv:my_images.csv -o features.parquet
  fastamp extract logs/run csv:mine.csv TEST.FLIP=on -o features.npz
"""

import argparse

from fastamp.cli.model_arguments import add_model_arguments, predictor_of
from fastamp.cli.options import add_key_values
from fastamp.utils.choices import EXTRACTED_SPLITS
from fastamp.utils.plural import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser)
    parser.add_argument(
        "source", metavar="DATA", help="folder, CSV file, or name as in DATASETS.NAMES (Demo, folder:FOLDER)"
    )
    parser.add_argument(
        "--output",
        "-o",
        required=True,
        metavar="OUT",
        help="output file, whose name ends in .npz, .csv or .parquet (pip install fastamp[parquet]); partial results "
        "are kept in OUT.parts until it is complete",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        choices=EXTRACTED_SPLITS,
        default=EXTRACTED_SPLITS,
        help="splits of a dataset (default: all)",
    )
    parser.add_argument("--skip-corrupt", action="store_true", help="skip and list images that cannot be read")
    add_key_values(parser, dest="key_values")
    parser.add_argument("--workers", type=int, help="number of worker processes (default: TEST.NUM_WORKERS)")


def run(args: argparse.Namespace) -> int:
    """Extract the features and print a summary."""
    from fastamp.inference.extract import check_output, extract
    from fastamp.inference.image_list import dataset_name

    check_output(args.output)
    if not args.source.isidentifier():  # a plain name can be a dataset of the project of the run
        dataset_name(args.source)
    extraction, skipped = extract(
        predictor_of(args, args.key_values),
        args.source,
        args.output,
        splits=args.splits,
        skip_corrupt=args.skip_corrupt,
        num_workers=args.workers,
    )
    count, model = len(extraction), extraction.model
    if skipped:
        print(f"skipped {plural(len(skipped), 'unreadable image')}:", *skipped, sep="\n  ")
    features = f"{plural(count, 'feature')} of dimension {model.width}"
    print(f"wrote {extraction.path}: {features}, model {model.config_hash}")
    return 0
