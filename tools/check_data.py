#!/usr/bin/env python
"""Check a dataset before training; alias of `fastamp check-data`."""

import sys

from fastamp.cli import run_command


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("check-data", argv)


if __name__ == "__main__":
    sys.exit(cli())
