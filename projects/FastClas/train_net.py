#!/usr/bin/env python
"""Train or evaluate recipes of FastClas with FastReID's arguments; alias of `fastamp train --plugin FastClas`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "FastClas", *sys.argv[1:]]))
