#!/usr/bin/env python
"""Convert a weights file of FastReID, torchreid or TransReID to a fastamp checkpoint; alias of `fastamp import`."""

import sys

from fastamp.cli import run_command


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("import", argv)


if __name__ == "__main__":
    sys.exit(cli())
