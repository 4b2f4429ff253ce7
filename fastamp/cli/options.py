"""Options that several commands have."""

import argparse


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Add ``--parts``, which ``read_config`` takes."""
    parser.add_argument("--parts", default="", metavar="FILE", help="Python file that registers parts of your own")
