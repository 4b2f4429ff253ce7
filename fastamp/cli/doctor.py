"""Check whether a model and a machine support mixed precision.

Compares bfloat16 and float16 with float32 on training and test images of a config, even if SOLVER.AMP is off. With
--env, the machine is also checked; with --env but without SOURCE, only the machine is checked. Exit code: 0 if no
change is needed, 1 if the printed changes are needed, 2 for invalid input.

examples:
  fastamp doctor --env
  fastamp doctor logs/run/model_best.pth --dtypes bf16
  fastamp doctor Market1501/sbs_R50-ibn DATASETS.NAMES Demo DATASETS.TESTS Demo
"""

import argparse
from pathlib import Path

from fastamp.cli.options import add_plugin_argument, add_source_arguments, at_least
from fastamp.cli.source import training_config
from fastamp.utils.errors import ConfigError

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}


def low_precisions(text: str) -> list[str]:
    """Parse a list such as ``bf16,float16`` into names of PyTorch dtypes."""
    try:
        chosen = [_DTYPES[word.strip()] for word in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(f"unknown dtype {error}; choices: bfloat16 (bf16), float16 (fp16)") from error
    return list(dict.fromkeys(chosen))


def examine_machine(device: str, decoder: str) -> bool:
    """Print the environment and its problems; return True if no problem was found.

    Raises:
        ConfigError: if ``MODEL.DEVICE`` or ``INPUT.DECODER`` is not available.
    """
    import torch

    from fastamp.amp import resolve_device
    from fastamp.data.image_decoder import image_decoder
    from fastamp.diagnostics.environment import inspect_environment

    decoder = image_decoder(decoder).name
    try:
        machine = inspect_environment(resolve_device(device), asked=device, decoder=decoder, train=True)
    except ConfigError:
        if not device.startswith("cuda"):
            raise
        # Its table has the reason.
        machine = inspect_environment(torch.device("cpu"), asked=device, decoder=decoder, train=True)
    print(machine.table())
    for problem in machine.problems:
        print(f"problem: {problem}")
    print(f"mixed precision on this machine: {'see the problems above' if machine.problems else 'no problems found'}")
    return not machine.problems


def examine_model(args: argparse.Namespace) -> bool:
    """Print the precision check of the config's model; return True if the config needs no change."""
    from fastamp.amp.policy import DTYPES
    from fastamp.diagnostics.doctor import diagnose
    from fastamp.diagnostics.doctor_report import FOLDER, write_amp_report
    from fastamp.engine import default_setup

    cfg = training_config(args, with_weights=True)
    default_setup(cfg, args)
    dtypes = [DTYPES[name] for name in args.dtypes]
    diagnosis = diagnose(cfg, dtypes=dtypes, batch_size=args.batch, max_images=args.images)
    if not diagnosis.problem:
        weights = cfg.MODEL.WEIGHTS or "initial weights, whose ranking is not meaningful"
        images = f"{diagnosis.images[0]} of {diagnosis.images[1]} test images"
        print(f"\n{cfg.MODEL.META_ARCHITECTURE} with {weights}, on {images}")
        for report in diagnosis.low:
            if report.layers:
                print(f"\n{report.dtype}: layers with the largest errors\n{diagnosis.layer_table(report)}")
            if report.failure:
                print(f"\n{report.dtype} fails with this config: {report.failure}")
        memory = "peak" if diagnosis.policy.device_type == "cuda" else "kept for the backward pass"
        print(f"\n{diagnosis.table()}\ntime: training pass, relative to float32; MiB: {memory}")
    print(f"\n{diagnosis.conclusion()}")
    for path in write_amp_report(diagnosis, Path(cfg.OUTPUT_DIR) / FOLDER):
        print(f"wrote {path}")
    return diagnosis.healthy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_source_arguments(parser)
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


def run(args: argparse.Namespace) -> int:
    """Check the machine, the model or both; return 0 if no problem was found, else 1."""
    healthy, has_config = True, bool(args.config_source or args.config_file)
    if args.env:
        from fastamp.amp import requested_device
        from fastamp.config import read_config
        from fastamp.engine.setup import set_cublas_workspace
        from fastamp.utils.logger import setup_logger

        setup_logger()
        if has_config:
            cfg = training_config(args, with_weights=True)
        else:
            cfg = read_config("", ["MODEL.DEVICE", "auto", *args.opts], plugin=args.plugin)
        set_cublas_workspace(cfg)  # the check of the machine computes matrix products
        healthy = examine_machine(requested_device(cfg), cfg.INPUT.DECODER)
    if has_config or not args.env:
        healthy = examine_model(args) and healthy
    return int(not healthy)
