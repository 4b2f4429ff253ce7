"""Options shared by several commands."""

import argparse

from fastamp.utils.moved import moved_names

__getattr__ = moved_names(__name__, {"add_parts": "fastamp.cli.options.add_plugin_argument"})


def add_plugin_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugin`` (former name: ``--parts``); the value is passed to ``read_config`` as ``plugin``."""
    parser.add_argument(
        "--plugin",
        "--parts",
        dest="plugin",
        default="",
        metavar="FILE",
        help="Python file that registers custom components and declares their config keys (former name: --parts)",
    )
