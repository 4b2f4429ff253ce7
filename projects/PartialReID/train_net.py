#!/usr/bin/env python
"""Train or evaluate PartialReID with FastReID's arguments."""

import argparse
import sys

from fastamp.config import read_config
from fastamp.engine import DefaultTrainer, default_argument_parser, default_setup, launch, run_command_line


def main(args: argparse.Namespace):
    cfg = read_config(args.config_file, args.opts, plugin="PartialReID")
    default_setup(cfg, args)
    if args.eval_only:
        return DefaultTrainer.test_weights(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


if __name__ == "__main__":
    args = default_argument_parser().parse_args()
    processes = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    sys.exit(run_command_line(lambda: launch(main, *processes, args=(args,))))
