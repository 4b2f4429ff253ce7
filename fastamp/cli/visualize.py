"""Draw a trained model's rank lists, curves, score histograms and similarity maps as PNG files."""

import argparse
import re
from pathlib import Path

from fastamp.utils.errors import ConfigError, WeightsError

KINDS = ("rank-lists", "cmc", "roc", "histogram", "grad-cam", "curves")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("source", metavar="RUN", help="a checkpoint of a run, or its OUTPUT_DIR (model_best.pth)")
    parser.add_argument("--data", metavar="NAME", help="test set, as in DATASETS.TESTS (default: those of the run)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="(default: all)")
    parser.add_argument("--num", type=int, default=6, metavar="N", help="queries in a picture (default: %(default)s)")
    parser.add_argument("--length", type=int, default=10, metavar="K", help="images a query (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random (default: %(default)s)")
    parser.add_argument("--output", metavar="DIR", help="(default: RUN's folder/pictures)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: %(default)s)")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values over the run's own")


def run(args: argparse.Namespace) -> int:
    """Draw what was asked for, and print the files' names.

    Raises:
        UserError: matplotlib is missing, the run, data or weights are wrong, or a file cannot be written.
    """
    from fastamp.evaluation import ReportOptions
    from fastamp.inference import Predictor
    from fastamp.inference.visualize import draw_set, write
    from fastamp.report import read_history
    from fastamp.report.curves import health_panels, training_panels
    from fastamp.report.figures import new_figure, panel_figure

    if args.num < 1 or args.length < 1:
        raise ConfigError(f"--num {args.num} and --length {args.length}: both are 1 at least")
    new_figure(1, 1)  # fails before the work, where matplotlib is missing
    checkpoint = checkpoint_of(Path(args.source))
    folder = Path(args.output) if args.output else checkpoint.parent / "pictures"
    kinds = set(args.kind)
    if "curves" in kinds:
        metrics = checkpoint.parent / "metrics.json"
        # Without a wish for curves their absence is no fault: a checkpoint alone is enough for the others.
        if metrics.exists() or kinds != set(KINDS):
            history = read_history(metrics)
            write(panel_figure(training_panels(history) + health_panels(history)), folder / "curves.png")
    if kinds - {"curves"}:
        predictor = Predictor(checkpoint, device=args.device, opts=args.opts)
        for name in [args.data] if args.data else predictor.cfg.DATASETS.TESTS:
            options = ReportOptions(
                kinds=("best", "worst", "random"), lists=args.num, length=args.length, seed=args.seed
            )
            draw_set(predictor, name, kinds, options, folder / re.sub(r"[^\w.-]+", "_", name))
    return 0


def checkpoint_of(source: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the best, else the final one in a folder.

    Raises:
        WeightsError: the folder has neither.
    """
    if not source.is_dir():
        return source
    for name in ("model_best.pth", "model_final.pth"):
        if (source / name).is_file():
            return source / name
    found = sorted(path.name for path in source.glob("*.pth"))
    raise WeightsError(
        f"{source} has neither model_best.pth nor model_final.pth.\n  found: {', '.join(found) or 'no .pth file'}\n"
        "  fix: name a checkpoint"
    )
