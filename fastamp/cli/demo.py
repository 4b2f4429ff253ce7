"""Train the quickstart: a ResNet-18 on generated pedestrians, in minutes on a laptop, without downloads.

The recipe is Demo/quickstart; the results and report.html are written to logs/demo.

examples:
  fastamp demo
  fastamp demo SOLVER.MAX_EPOCH=4 OUTPUT_DIR=logs/short
"""

import argparse

from fastamp.cli import train
from fastamp.cli.options import add_key_values
from fastamp.utils.arguments import add_launch_arguments

RECIPE = "Demo/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--dry-run", action="store_true", help="estimate time and memory, and exit")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted demo")
    add_launch_arguments(parser)
    add_key_values(parser)
    parser.set_defaults(config_source=RECIPE, config_file="", eval_only=False, plugin="", seeds=[], list_config=None)


def run(args: argparse.Namespace) -> int:
    """Train the recipe."""
    return train.run(args)
