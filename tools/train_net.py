#!/usr/bin/env python
"""Train or evaluate the model that a config file describes."""

import argparse
import sys
from typing import Any

from fastamp.config import CfgNode, describe_config
from fastamp.engine import DefaultTrainer, default_argument_parser, default_setup, launch, run_command_line
from fastamp.engine.setup import read_config


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of FastReID's command line, and of what is new in it."""
    parser = default_argument_parser()
    parser.add_argument("--parts", default="", metavar="FILE", help="Python file that registers parts of your own")
    return parser


def setup(args: argparse.Namespace) -> CfgNode:
    """Return the frozen config of the config file and the command line."""
    cfg = read_config(args.config_file, args.opts, parts=getattr(args, "parts", ""))
    default_setup(cfg, args)
    return cfg


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments ask for and return the metrics."""
    cfg = setup(args)
    if args.eval_only:
        return DefaultTrainer.test_weights(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argument_parser()
    parser.add_argument(
        "--list-config",
        nargs="?",
        const="",
        metavar="PREFIX",
        help="print the config keys that begin with PREFIX, with default and meaning, and stop",
    )
    args = parser.parse_args(argv)
    if args.list_config is not None:
        return run_command_line(lambda: print(describe_config(args.list_config)))
    return run_command_line(
        lambda: launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))
    )


if __name__ == "__main__":
    sys.exit(cli())
