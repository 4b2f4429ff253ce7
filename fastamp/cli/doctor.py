"""Examine the mixed precision of a model on its own data.

--env examines the machine first, and nothing else without a config. Exit code 0 when the config is sound as it is, 1
when it is not (what to paste into it is printed), 2 when the input is wrong. Where SOLVER.AMP is off, it is examined
as if it were on.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from fastamp.cli.options import add_plugin_argument
from fastamp.utils.errors import ConfigError

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}


def low_precisions(text: str) -> list[str]:
    """Parse a list like ``bf16,float16`` into the names of torch's dtypes."""
    try:
        chosen = [_DTYPES[word.strip()] for word in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"{error} is not bfloat16 (bf16) or float16 (fp16)") from error
    return list(dict.fromkeys(chosen))


def at_least(lowest: int) -> Callable[[str], int]:
    """Return what reads a whole number from ``lowest`` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return number


def examine_machine(device: str) -> bool:
    """Print the table of the machine's facts and what is wrong; return whether nothing is."""
    import torch

    from fastamp.amp import resolve_device
    from fastamp.diagnostics.environment import inspect_environment

    try:
        machine = inspect_environment(resolve_device(device), asked=device, train=True)
    except ConfigError:
        if not device.startswith("cuda"):
            raise
        machine = inspect_environment(
            torch.device("cpu"), asked=device, train=True
        )  # whose table says why it is not there
    print(machine.table())
    for problem in machine.problems:
        print(f"problem: {problem}")
    print("the machine has the problems above" if machine.problems else "the machine is fit for mixed precision")
    return not machine.problems


def examine_model(args: argparse.Namespace) -> bool:
    """Print the tables and the verdict on the config's model; return whether it is sound as it is."""
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
        weights = cfg.MODEL.WEIGHTS or "weights as training starts with them: the ranking says little"
        print(f"\n{cfg.MODEL.META_ARCHITECTURE} with {weights}; {found.images[0]} of {found.images[1]} test images")
        for each in found.low:
            if each.layers:
                print(f"\n{each.dtype}, the layers that stand out\n{found.layer_table(each)}")
            if each.failure:
                print(f"\n{each.dtype} fails as the config is: {each.failure}")
        memory = "peak" if found.policy.device_type == "cuda" else "kept for the backward pass"
        print(f"\n{found.table()}\ntime: x float32's, a training pass; MiB: {memory}")
    print(f"\n{found.conclusion()}")
    for path in write_amp_report(found, Path(cfg.OUTPUT_DIR) / FOLDER):
        print(f"wrote {path}")
    return found.healthy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to examine, and how closely."""
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file")
    parser.add_argument("--env", action="store_true", help="examine the machine: versions, driver, dtypes, memory")
    parser.add_argument(
        "--dtypes",
        type=low_precisions,
        default="bfloat16,float16",
        metavar="LIST",
        help="what to examine (default: %(default)s; float16 is slow on most CPUs)",
    )
    parser.add_argument(
        "--batch", type=at_least(2), default=16, help="training images to look at (default: %(default)s)"
    )
    parser.add_argument(
        "--images", type=at_least(0), default=512, help="test images to rank, 0 is all (default: %(default)s)"
    )
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and their values")


def run(args: argparse.Namespace) -> int:
    """Examine the machine, the model or both; 0 when all is sound, else 1."""
    sound = True
    if args.env:
        from fastamp.config import read_config
        from fastamp.utils.logger import setup_logger

        setup_logger()
        opts = args.opts if args.config_file else ["MODEL.DEVICE", "auto", *args.opts]
        sound = examine_machine(read_config(args.config_file, opts, plugin=args.plugin).MODEL.DEVICE)
    if args.config_file or not args.env:
        sound = examine_model(args) and sound
    return int(not sound)
