#!/usr/bin/env python
"""Train or evaluate a model of pedestrian attributes, with the arguments of tools/train_net.py."""

import sys

from fastamp.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--plugin", "FastAttr", *sys.argv[1:]]))
