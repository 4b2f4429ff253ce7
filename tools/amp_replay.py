#!/usr/bin/env python
"""Replay a failed training step from a crash dump; alias of `fastamp replay`."""

import sys

from fastamp.cli import run_command
from fastamp.diagnostics.replay import replay

__all__ = ["cli", "replay"]


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("replay", argv)


if __name__ == "__main__":
    sys.exit(cli())
