#!/usr/bin/env python
"""Train or evaluate recipes of PartialReID with FastReID's arguments; alias of `fastamp train --plugin PartialReID`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "PartialReID", *sys.argv[1:]]))
