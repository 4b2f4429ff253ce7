#!/usr/bin/env python
"""Train or evaluate a face recognition model; the arguments are those of `fastamp train`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "FastFace", *sys.argv[1:]]))
