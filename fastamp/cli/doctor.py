"""Check whether a model and a machine support mixed precision.

Compares bfloat16 and float16 with float32 on training and test images of a config, even if SOLVER.AMP is off. With
--env, the machine is also checked; with --env but without --config-file, only the machine is checked. Exit code: 0 if
no change is needed, 1 if the printed changes are needed, 2 for invalid input.

examples:
  fastamp doctor --env
  fastamp doctor --config-file my.yml --dtypes bf16 MODEL.WEIGHTS logs/run/model_best.pth
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from fastamp.cli.options import add_plugin_argument
from fastamp.utils.errors import ConfigError

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}


def low_precisions(text: str) -> list[str]:
    """Parse a list such as ``bf16,float16`` into names of PyTorch dtypes."""
    try:
        chosen = [_DTYPES[word.strip()] for word in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"unknown dtype {error}; choices: bfloat16 (bf16), float16 (fp16)") from error
    return list(dict.fromkeys(chosen))


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least ``lowest``, for argparse."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {lowest}, got {text!r}")
        return int(text)

    return number


def examine_machine(device: str) -> bool:
    """Print the environment and its problems; return True if no problem was found."""
    import torch

    from fastamp.amp import resolve_device
    from fastamp.diagnostics.environment import inspect_environment

    try:
        machine = inspect_environment(resolve_device(device), asked=device, train=True)
    except ConfigError:
        if not device.startswith("cuda"):
            raise
        machine = inspect_environment(torch.device("cpu"), asked=device, train=True)  # its table has the reason
    print(machine.table())
    for problem in machine.problems:
        print(f"problem: {problem}")
    print(f"mixed precision on this machine: {'see the problems above' if machine.problems else 'no problems found'}")
    return not machine.problems


def examine_model(args: argparse.Namespace) -> bool:
    """Print the precision check of the config's model; return True if the config needs no change."""
    import torch

    from fastamp.config import read_config
    from fastamp.diagnostics.doctor import diagnose
    from fastamp.diagnostics.doctor_report import FOLDER, write_amp_report
    from fastamp.engine import default_setup

    cfg = read_config(args.config_file, args.opts, plugin=args.plugin)
    default_setup(cfg, args)
    dtypes = [getattr(torch, name) for name in args.dtypes]
    found = diagnose(cfg, dtypes=dtypes, batch_size=args.batch, max_images=args.images)
    if not found.problem:
        weights = cfg.MODEL.WEIGHTS or "initial weights, whose ranking is not meaningful"
        print(f"\n{cfg.MODEL.META_ARCHITECTURE} with {weights}, on {found.images[0]} of {found.images[1]} test images")
        for each in found.low:
            if each.layers:
                print(f"\n{each.dtype}: layers with the largest errors\n{found.layer_table(each)}")
            if each.failure:
                print(f"\n{each.dtype} fails with this config: {each.failure}")
        memory = "peak" if found.policy.device_type == "cuda" else "kept for the backward pass"
        print(f"\n{found.table()}\ntime: training pass, relative to float32; MiB: {memory}")
    print(f"\n{found.conclusion()}")
    for path in write_amp_report(found, Path(cfg.OUTPUT_DIR) / FOLDER):
        print(f"wrote {path}")
    return found.healthy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file")
    parser.add_argument(
        "--env", action="store_true", help="check the machine: versions, driver, dtypes, memory, and a short training"
    )
    parser.add_argument(
        "--dtypes",
        type=low_precisions,
        default="bfloat16,float16",
        metavar="LIST",
        help="dtypes to check (default: %(default)s; float16 is slow on most CPUs)",
    )
    parser.add_argument(
        "--batch", type=at_least(2), default=16, help="number of training images (default: %(default)s)"
    )
    parser.add_argument(
        "--images", type=at_least(0), default=512, help="number of test images, 0 for all (default: %(default)s)"
    )
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and values")


def run(args: argparse.Namespace) -> int:
    """Check the machine, the model or both; return 0 if no problem was found, else 1."""
    healthy = True
    if args.env:
        from fastamp.config import read_config
        from fastamp.engine.setup import set_cublas_workspace
        from fastamp.utils.logger import setup_logger

        setup_logger()
        opts = args.opts if args.config_file else ["MODEL.DEVICE", "auto", *args.opts]
        cfg = read_config(args.config_file, opts, plugin=args.plugin)
        set_cublas_workspace(cfg)  # the check of the machine computes matrix products
        healthy = examine_machine(cfg.MODEL.DEVICE)
    if args.config_file or not args.env:
        healthy = examine_model(args) and healthy
    return int(not healthy)
