#!/usr/bin/env python
"""Search hyper-parameters: tune_net.py --config-file X.yml --space SPACE.yml [--num-trials N] [KEY VALUE ...].

Trials are ordinary trainings, judged on identities held out of the training set; the test set is looked at once, by
the winner. OUTPUT_DIR holds best_config.yaml, trials.csv, trials.png and a folder for each trial. Exit code 1 when no
trial came to an evaluation.
"""

import argparse
import math
import sys
from pathlib import Path

from autotuner.results import table, write_results
from autotuner.search import ALGORITHMS, SCHEDULERS, Search, run_search
from autotuner.space import BATCH, IDENTITIES, IMAGES, Space, read_space
from autotuner.split import hold_out

from fastamp.config import CfgNode
from fastamp.data.build import build_dataset, training_items
from fastamp.engine import DefaultTrainer, run_command_line
from fastamp.engine.setup import check_config, read_config
from fastamp.utils.logger import setup_logger


def grace_epochs(cfg: CfgNode, space: Space, images: int) -> int:
    """Return after how many epochs warm-up and freezing have ended, whatever is drawn, on a number of images."""
    identities = space.parameters.get(IDENTITIES)
    batches = [cfg.SOLVER.IMS_PER_BATCH]
    if BATCH in space.parameters:
        batches = list(space.parameters[BATCH].extremes())
    if identities is not None:
        counts = space.parameters[IMAGES].extremes() if IMAGES in space.parameters else [cfg.DATALOADER.NUM_INSTANCE]
        batches = [max(identities.extremes()) * max(counts)]
    fewest = max(1, images // int(max(batches)))
    iterations = [
        max(space.parameters[key].extremes()) if key in space.parameters else value
        for key, value in (
            ("SOLVER.WARMUP_ITERS", cfg.SOLVER.WARMUP_ITERS),
            ("SOLVER.FREEZE_ITERS", cfg.SOLVER.FREEZE_ITERS if cfg.MODEL.FREEZE_LAYERS else 0),
        )
    ]
    return max(1, math.ceil(max(iterations) / fewest))


def tune(args: argparse.Namespace) -> int:
    """Search, write the results and evaluate the winner; return the exit code."""
    cfg = read_config(args.config_file, args.opts, parts=args.parts)
    check_config(cfg)
    space = read_space(args.space, cfg)
    setup_logger(cfg.OUTPUT_DIR)
    # Prepared here, once, before any trial needs it; and what is wrong with it is said at once.
    items = training_items([build_dataset(name) for name in cfg.DATASETS.NAMES])
    training, _, _ = hold_out(items, args.val_fraction, args.seed)
    search = Search(
        cfg=cfg,
        space=space,
        algorithm=args.srch_algo,
        scheduler=args.scheduler,
        trials=args.num_trials,
        seed=args.seed,
        validation_fraction=args.val_fraction,
        grace_epochs=grace_epochs(cfg, space, len(training)),
        cpus=args.cpus_per_trial,
        gpus=args.gpus_per_trial,
        max_concurrent=args.max_concurrent,
        max_failures=args.max_failures,
        parts=str(Path(args.parts).resolve()) if args.parts else "",
    )
    outcomes = run_search(search)
    print(table(outcomes, space))
    for path in write_results(outcomes, cfg, space):
        print(f"wrote {path}")
    failed = sum(bool(each.failure) for each in outcomes)
    if failed:
        print(f"{failed} of {len(outcomes)} trials failed: their headlines are in trials.csv")
    winner = outcomes[0] if outcomes else None
    if winner is None or winner.score is None:
        return 1
    best = space.apply(cfg, winner.values).clone()
    best.defrost()
    best.MODEL.WEIGHTS = str(winner.folder / "model_best.pth")
    best.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / "winner")
    best.freeze()
    print(f"the winner, {winner.name}, on the test set (trained without the identities held out):")
    DefaultTrainer.test_weights(best)
    return 0


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file")
    parser.add_argument("--space", required=True, metavar="FILE", help="YAML file: config key -> what it is drawn from")
    parser.add_argument("--num-trials", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--srch-algo", choices=ALGORITHMS, default="hyperopt", help="(default: %(default)s)")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="asha", help="(default: %(default)s)")
    parser.add_argument("--pbt", action="store_true", help="short for --srch-algo random --scheduler pbt")
    parser.add_argument("--val-fraction", type=float, default=0.2, help="of the training identities, held out")
    parser.add_argument("--cpus-per-trial", type=float, default=1)
    parser.add_argument("--gpus-per-trial", type=float, default=0, help="a fraction shares a GPU")
    parser.add_argument("--max-concurrent", type=int, default=0, help="trials at once; 0 is as many as fit")
    parser.add_argument("--max-failures", type=int, default=0, help="times that a crashed trial is tried again")
    parser.add_argument("--seed", type=int, default=0, help="of the draws and of the identities held out")
    parser.add_argument("--parts", default="", metavar="FILE", help="Python file that registers parts of your own")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and their values")
    args = parser.parse_args(argv)
    if args.pbt:
        args.srch_algo, args.scheduler = "random", "pbt"
    if args.num_trials < 1:
        parser.error(f"--num-trials {args.num_trials}: expected 1 at least")
    codes: list[int] = []
    return run_command_line(lambda: codes.append(tune(args))) or codes[0]


if __name__ == "__main__":
    sys.exit(cli())
