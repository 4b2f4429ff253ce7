"""Write a checkpoint without its training state: smaller, for evaluation, extraction, export and fine-tuning."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that a run wrote, e.g. logs/x/model_best.pth")
    parser.add_argument("output", metavar="OUT", nargs="?", help="default: CHECKPOINT_stripped.pth, in its folder")


def run(args: argparse.Namespace) -> int:
    """Strip, and print what was written."""
    from fastamp.checkpoint.strip import strip

    report = strip(args.checkpoint, args.output)
    before, after = (f"{size / 1e6:.1f} MB" for size in (report.bytes_before, report.bytes_after))
    print(f"wrote {report.path}: {after}, was {before}; weights: {report.weights}")
    print(f"removed: {', '.join(report.removed) or 'nothing'}")
    return 0
