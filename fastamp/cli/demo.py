"""Train the quickstart: a ResNet-18 on generated pedestrians, in minutes on a laptop, without downloads.

The recipe is Demo/quickstart; the results and report.html are written to logs/demo. With --sequence, nothing is
trained: a video sequence of pedestrians is generated, for `fastamp track`.

examples:
  fastamp demo
  fastamp demo SOLVER.MAX_EPOCH=4 OUTPUT_DIR=logs/short
  fastamp demo --sequence street
"""

import argparse

from fastamp.cli import train
from fastamp.cli.options import add_key_values
from fastamp.utils.arguments import add_launch_arguments

RECIPE = "Demo/quickstart"
FRAMES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--dry-run", action="store_true", help="estimate time and memory, and exit")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted demo")
    parser.add_argument(
        "--sequence",
        metavar="FOLDER",
        help="only write a sequence with detections and ground truth, in the layout of the MOT Challenge",
    )
    add_launch_arguments(parser)
    add_key_values(parser)
    train.set_recipe(parser, RECIPE)
    parser.set_defaults(plugin="")


def run(args: argparse.Namespace) -> int:
    """Train the recipe, or generate the sequence."""
    if args.sequence:
        return _generate(args.sequence)
    return train.run(args)


def _generate(folder: str) -> int:
    """Generate the sequence with a progress bar."""
    from fastamp.demo.sequence import generate_sequence
    from fastamp.utils.errors import writing
    from fastamp.utils.progress import ProgressBar

    bar = ProgressBar(FRAMES, "drawing frames")
    try:
        with writing(folder):
            generate_sequence(folder, frames=FRAMES, progress=lambda done, _: bar.update(done))
    finally:
        bar.close()
    print(f"wrote {folder}: {FRAMES} frames, det/det.txt and gt/gt.txt")
    return 0
