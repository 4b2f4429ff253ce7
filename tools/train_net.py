#!/usr/bin/env python
"""Train or evaluate the model defined by a config file; alias of `fastamp train`."""

import sys

from fastamp.cli import run_command
from fastamp.cli.train import argument_parser, main, setup
from fastamp.utils.arguments import default_argument_parser

__all__ = ["argument_parser", "cli", "default_argument_parser", "main", "setup"]


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("train", argv)


if __name__ == "__main__":
    sys.exit(cli())
