#!/usr/bin/env python
"""Replay a failed training step from a crash dump: amp_replay.py OUTPUT_DIR/amp_crash [KEY VALUE ...].

KEY VALUE pairs override the config in the crash dump, e.g. to test a fix on the failed step. The exit code is 0 if the
losses, gradients and evaluation features of the replay are finite, 1 if a value is not finite, and 2 if the crash dump
or an option is invalid.
"""

import argparse
import sys

from fastamp.cli.options import add_plugin_argument
from fastamp.diagnostics.replay import replay
from fastamp.engine import run_command_line
from fastamp.utils.files import ignore_closed_stdout
from fastamp.utils.logger import setup_logger


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("crash", metavar="CRASH", help="crash dump, or the folder amp_crash with the newest dump")
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and values to try")
    args = parser.parse_args(argv)
    setup_logger()
    outcome: list[bool] = []
    code = run_command_line(lambda: outcome.append(replay(args.crash, args.opts, plugin=args.plugin)))
    return code or int(not outcome[0])


if __name__ == "__main__":
    with ignore_closed_stdout():
        sys.exit(cli())
