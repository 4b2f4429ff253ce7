#!/usr/bin/env python
"""Train or evaluate recipes of FastRetri with FastReID's arguments; alias of `fastamp train --plugin FastRetri`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "FastRetri", *sys.argv[1:]]))
