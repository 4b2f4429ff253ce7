"""Remove the training state from a checkpoint.

The smaller file works for evaluation, extraction, export and fine-tuning, but not for --resume.

examples:
  fastamp strip logs/run/model_best.pth
  fastamp strip logs/run model.pth
  fastamp strip logs/run --adapters
"""

import argparse

from fastamp.cli.model_arguments import SOURCE_HELP
from fastamp.cli.source import evaluation_config, model_source, resolve_source
from fastamp.utils.plural import mebibytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("checkpoint", metavar="SOURCE", type=model_source, help=SOURCE_HELP)
    parser.add_argument(
        "output", metavar="OUT", nargs="?", help="output file (default: CHECKPOINT_stripped.pth in the same folder)"
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write only the LoRA adapters and the heads (default file name: CHECKPOINT_adapters.pth)",
    )


def run(args: argparse.Namespace) -> int:
    """Strip the checkpoint and print a summary."""
    from fastamp.checkpoint.strip import strip

    source = resolve_source(args.checkpoint)
    checkpoint = source.checkpoint or evaluation_config(args.checkpoint, [])[0].MODEL.WEIGHTS
    report = strip(checkpoint, args.output, adapters=args.adapters)
    before, after = map(mebibytes, (report.bytes_before, report.bytes_after))
    print(f"wrote {report.path}: {after}, was {before}; weights: {report.weights}")
    print(f"removed: {', '.join(report.removed) or 'nothing'}")
    return 0
