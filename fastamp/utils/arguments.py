"""Command-line arguments of training. Parsing does not import PyTorch."""

import argparse
from typing import NoReturn

from fastamp.utils.files import ignore_closed_stdout


class _Parser(argparse.ArgumentParser):
    """Argument parser whose help text can be piped to a program that exits early, e.g. ``head``."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        with ignore_closed_stdout():
            super().exit(status, message)


def default_argument_parser() -> argparse.ArgumentParser:
    """Build a parser with the command-line arguments of training."""
    parser = _Parser(description="Train or evaluate a re-identification model.")
    add_training_arguments(parser)
    return parser


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments of training to ``parser``."""
    add_run_arguments(parser)
    add_process_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume`` and ``--eval-only`` to ``parser``."""
    parser.add_argument("--resume", action="store_true", help="continue from OUTPUT_DIR/last_checkpoint")
    parser.add_argument(
        "--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS on DATASETS.TESTS, without training"
    )


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the config and for distributed processes to ``parser``."""
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file")
    add_launch_arguments(parser)
    parser.add_argument(
        "opts",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help="config keys and values that override the config file",
    )


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for distributed processes to ``parser``."""
    parser.add_argument(
        "--num-gpus", type=int, default=1, help="number of processes (GPUs) per machine (default: %(default)s)"
    )
    parser.add_argument("--num-machines", type=int, default=1, help="number of machines (default: %(default)s)")
    parser.add_argument(
        "--machine-rank", type=int, default=0, help="rank of this machine, from 0 (default: %(default)s)"
    )
    parser.add_argument("--dist-url", default=None, help="address of the first machine, e.g. tcp://127.0.0.1:29500")
