#!/usr/bin/env python
"""Check whether a model trains and evaluates correctly in mixed precision; alias of `fastamp doctor`."""

import sys

from fastamp.cli import run_command


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("doctor", argv)


if __name__ == "__main__":
    sys.exit(cli())
