#!/usr/bin/env python
"""Train or evaluate recipes with FastReID's arguments; alias of `fastamp train --plugin DomainGeneralization`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "DomainGeneralization", *sys.argv[1:]]))
