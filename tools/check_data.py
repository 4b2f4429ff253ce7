#!/usr/bin/env python
"""Look at a data set before training on it, as `fastamp check-data`."""

import sys

from fastamp.cli import run_command


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("check-data", argv)


if __name__ == "__main__":
    sys.exit(cli())
