"""Evaluate the weights MODEL.WEIGHTS on the data sets DATASETS.TESTS."""

import argparse

from fastamp.cli.options import add_parts
from fastamp.cli.train import run
from fastamp.engine.setup import add_process_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of a training that mean something here."""
    add_process_arguments(parser)
    add_parts(parser)
    parser.set_defaults(eval_only=True, resume=False, dry_run=False, list_config=None)
