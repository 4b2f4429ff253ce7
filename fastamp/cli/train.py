"""Train a model from a recipe or YAML file, or evaluate it with --eval-only.

With a run folder as SOURCE, its config is used and the run is repeated, or continued with --resume. With a checkpoint,
its config and weights are the start of a new run; set OUTPUT_DIR.

examples:
  fastamp train Market1501/sbs_R50-ibn SOLVER.AMP on
  fastamp train my.yml OUTPUT_DIR=logs/run --num-gpus 4
  fastamp train logs/run --resume
  fastamp train logs/run/model_best.pth DATASETS.NAMES csv:mine.csv OUTPUT_DIR logs/fine_tuned
  fastamp train my.yml OUTPUT_DIR=logs/run --seeds 0 1 2
  fastamp train my.yml OUTPUT_DIR=logs/run --all-splits DATASETS.NAMES VIPeR DATASETS.TESTS VIPeR TEST.ALL_SPLITS on
"""

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastamp.cli.options import add_plugin_argument, add_source_arguments
from fastamp.cli.source import CHECKPOINT, evaluation_config, move_config, resolve_source, training_config
from fastamp.utils.arguments import add_launch_arguments, add_run_arguments, default_argument_parser
from fastamp.utils.errors import ConfigError
from fastamp.utils.signals import handling

if TYPE_CHECKING:
    from fastamp.config import CfgNode


def argument_parser() -> argparse.ArgumentParser:
    """Build the parser of training, with ``--plugin`` added."""
    parser = default_argument_parser()
    add_plugin_argument(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_source_arguments(parser)
    add_run_arguments(parser)
    add_launch_arguments(parser)
    add_plugin_argument(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run two iterations and a small evaluation, print an estimate of time and memory, and exit",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="train once per seed in OUTPUT_DIR/seed<N>; print mean, standard deviation and range of the metrics",
    )
    parser.add_argument(
        "--all-splits",
        action="store_true",
        help="train once per random split of the training set, e.g. VIPeR, in OUTPUT_DIR/seed<N>_split<K>; print mean "
        "and standard deviation; TEST.ALL_SPLITS True also averages both directions of VIPeR",
    )
    parser.add_argument(
        "--list-config",
        nargs="?",
        const="",
        metavar="PREFIX",
        help="print the config keys of a section with default and description, and exit",
    )


def setup(args: argparse.Namespace) -> "CfgNode":
    """Read the config and set up logging; return the frozen config."""
    from fastamp.engine import default_setup

    text = vars(args).get("config_source", "")
    if args.eval_only and text:
        cfg, _ = evaluation_config(args.config_file, args.opts, plugin=args.plugin, source=text)
    else:
        cfg = training_config(args)
    default_setup(cfg, args)
    return cfg


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Train or evaluate in one process and return the metrics."""
    from fastamp.engine import DefaultTrainer

    cfg = setup(args)
    if args.eval_only:
        return DefaultTrainer.test_weights(cfg)
    return _train(cfg, args)


def set_recipe(parser: argparse.ArgumentParser, recipe: str) -> None:
    """Set the arguments of this command for another one that trains ``recipe`` and does not have them."""
    parser.set_defaults(
        config_source=recipe, config_file="", eval_only=False, seeds=[], all_splits=False, list_config=None
    )


def main_seeds(args: argparse.Namespace) -> dict[str, Any]:
    """Train with each of ``args.seeds``, on each split with ``args.all_splits``; return the summary of the metrics."""
    from fastamp.data.random_splits import training_splits
    from fastamp.engine import default_setup
    from fastamp.engine.seeds import train_seeds

    def train(cfg: "CfgNode") -> dict[str, Any]:
        default_setup(cfg, args)
        return _train(cfg, args)

    cfg = training_config(args)
    splits = training_splits(cfg) if args.all_splits else [{}]
    if args.all_splits and len(splits) == 1:
        raise ConfigError(
            f"--all-splits: {', '.join(cfg.DATASETS.NAMES)} has no random splits.\n"
            "  fix: remove it; CUHK03 has them with DATASETS.CUHK03.CLASSIC True"
        )
    return train_seeds(cfg, args.seeds or [max(0, cfg.SEED)], train, splits=splits)


def _train(cfg: "CfgNode", args: argparse.Namespace) -> dict[str, Any]:
    from fastamp.engine import DefaultTrainer

    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


def run_dry(args: argparse.Namespace, folder: str) -> None:
    """Perform a dry run that writes its files to ``folder``."""
    from fastamp.engine.dry_run import dry_run

    dry_run(training_config(args), folder, resume=args.resume)


def run(args: argparse.Namespace, train: Callable[[argparse.Namespace], dict[str, Any]] | None = None) -> int:
    """Launch the training, evaluation or dry run.

    Args:
        args: arguments of the command line.
        train: function of ``args`` that trains in each process. Default: ``main``, or ``main_seeds`` with --seeds or
            --all-splits.
    """
    if args.list_config is not None:
        from fastamp.config import describe_config

        print(describe_config(args.list_config))
        return 0
    if args.dry_run and args.eval_only:
        raise ConfigError("--dry-run and --eval-only cannot be combined.\n  fix: remove one of them")
    several = "--seeds" if args.seeds else "--all-splits" if args.all_splits else ""
    if several and (args.dry_run or args.eval_only):
        raise ConfigError(f"{several} cannot be combined with --dry-run or --eval-only.\n  fix: remove one of them")
    args = move_config(args)
    if args.resume and args.config_source and resolve_source(args.config_source).kind == CHECKPOINT:
        raise ConfigError(
            f"--resume continues a run from its folder, got the checkpoint {args.config_source}.\n"
            f"  fix: fastamp train {Path(args.config_source).parent} --resume"
        )
    from fastamp.engine import launch

    processes = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    options = {}
    if args.config_source and not args.eval_only:
        cfg = training_config(args)
        minutes = cfg.DIST_TIMEOUT_MINUTES
        options = {"device": cfg.MODEL.DEVICE, "timeout": timedelta(minutes=minutes) if minutes else None}
    if not args.dry_run:
        launch(train or (main_seeds if several else main), *processes, args=(args,), **options)
        return 0
    # Created in the parent process: a failing child process is killed without time for cleanup.
    with _exit_on_signals(), TemporaryDirectory(prefix="fastamp_dry_run_", ignore_cleanup_errors=True) as folder:
        launch(run_dry, *processes, args=(args, folder), **options)
    return 0


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit with exit code 128 + n on signals that would kill this process without cleanup."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with handling(stop, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)):
        yield
