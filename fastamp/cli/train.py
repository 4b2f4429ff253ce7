"""Train the model that a config file describes, or evaluate it."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastamp.cli.options import add_plugin_argument
from fastamp.utils.arguments import add_training_arguments, default_argument_parser
from fastamp.utils.errors import ConfigError
from fastamp.utils.signals import handling

if TYPE_CHECKING:
    from fastamp.config import CfgNode


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of FastReID's command line, and of what is new in it."""
    parser = default_argument_parser()
    add_plugin_argument(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the same, and what needs no training."""
    add_training_arguments(parser)
    add_plugin_argument(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, try two iterations and a small evaluation, say what the run will take, and stop",
    )
    parser.add_argument(
        "--list-config",
        nargs="?",
        const="",
        metavar="PREFIX",
        help="print the config keys that begin with PREFIX, with default and meaning, and stop",
    )


def setup(args: argparse.Namespace) -> "CfgNode":
    """Return the frozen config of the config file and the command line."""
    from fastamp.config import read_config
    from fastamp.engine import default_setup

    cfg = read_config(args.config_file, args.opts, plugin=getattr(args, "plugin", ""))
    default_setup(cfg, args)
    return cfg


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments ask for and return the metrics."""
    from fastamp.engine import DefaultTrainer

    cfg = setup(args)
    if args.eval_only:
        return DefaultTrainer.test_weights(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    return trainer.train()


def try_out(args: argparse.Namespace, folder: str) -> None:
    """Try the run that the arguments ask for, with ``folder`` for what it writes."""
    from fastamp.config import read_config
    from fastamp.engine.dry_run import dry_run

    dry_run(read_config(args.config_file, args.opts, plugin=args.plugin), folder, resume=args.resume)


def run(args: argparse.Namespace) -> int:
    """Start the processes that do what the arguments ask for."""
    if args.list_config is not None:
        from fastamp.config import describe_config

        print(describe_config(args.list_config))
        return 0
    if args.dry_run and args.eval_only:
        raise ConfigError("--dry-run tries a training, and --eval-only asks for none.\n  fix: leave one of them out")
    from fastamp.engine import launch

    processes = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    if not args.dry_run:
        launch(main, *processes, args=(args,))
        return 0
    # Made here: a process of several that fails is ended with no time to clear up.
    with _clearing_up(), TemporaryDirectory(prefix="fastamp_dry_run_", ignore_cleanup_errors=True) as folder:
        launch(try_out, *processes, args=(args, folder))
    return 0


@contextmanager
def _clearing_up() -> Iterator[None]:
    """Let the signals that would end this process at once raise SystemExit inside, with the same exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with handling(stop, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)):
        yield
