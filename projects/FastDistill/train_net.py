#!/usr/bin/env python
"""Train or evaluate recipes of FastDistill with FastReID's arguments; alias of `fastamp train --plugin FastDistill`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "FastDistill", *sys.argv[1:]]))
