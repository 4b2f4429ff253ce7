#!/usr/bin/env python
"""Convert a weights file of FastReID, torchreid or TransReID to a fastamp checkpoint; alias of `fastamp import`."""

import sys

from fastamp.cli import run_command
from fastamp.inference.import_checkpoint import import_checkpoint, prefix_hint, weights_below, write_model

__all__ = ["cli", "import_checkpoint", "prefix_hint", "weights_below", "write_model"]


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("import", argv)


if __name__ == "__main__":
    sys.exit(cli())
