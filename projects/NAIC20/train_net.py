#!/usr/bin/env python
"""Train or evaluate recipes of NAIC20 with FastReID's arguments; alias of `fastamp train --plugin NAIC20`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "NAIC20", *sys.argv[1:]]))
