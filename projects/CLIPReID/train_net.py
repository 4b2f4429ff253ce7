#!/usr/bin/env python
"""Train or evaluate recipes of CLIP-ReID; alias of `fastamp train --plugin CLIPReID`."""

import sys

from fastamp.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("train", ["--plugin", "CLIPReID", *sys.argv[1:]]))
