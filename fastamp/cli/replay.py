"""Replay a failed training step from a crash dump.

KEY VALUE pairs override the config in the crash dump, e.g. to test a fix on the failed step. The exit code is 0 if the
losses, gradients and evaluation features of the replay are finite, 1 if a value is not finite, and 2 if the crash dump
or an option is invalid.

examples:
  fastamp replay logs/run
  fastamp replay logs/run/amp_crash SOLVER.AMP=bf16
"""

import argparse
from pathlib import Path

from fastamp.cli.options import add_key_values, add_plugin_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "crash", metavar="CRASH", help="crash dump, or a run folder or its folder amp_crash for the newest dump"
    )
    add_plugin_argument(parser)
    add_key_values(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the crash dump; return 0 if all values are finite, else 1."""
    from fastamp.diagnostics.replay import replay
    from fastamp.utils.logger import setup_logger

    setup_logger()
    in_run = Path(args.crash).expanduser() / "amp_crash"
    return int(not replay(str(in_run) if in_run.is_dir() else args.crash, args.opts, plugin=args.plugin))
