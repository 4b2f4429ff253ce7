#!/usr/bin/env python
"""Evaluate features saved by fastamp or another program; alias of `fastamp evaluate-features`."""

import sys

from fastamp.cli import run_command


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("evaluate-features", argv)


if __name__ == "__main__":
    sys.exit(cli())
