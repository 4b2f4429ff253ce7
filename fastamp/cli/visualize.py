"""Draw rank lists, curves, score histograms and similarity maps of a trained model as PNG, PDF or SVG files.

examples:
  fastamp visualize logs/run
  fastamp visualize logs/run --kind rank-lists cmc --format pdf --dpi 300
  fastamp visualize logs/run/model_best.pth --kind rank-lists grad-cam --data Market1501
"""

import argparse
import re
from pathlib import Path

from fastamp.cli.model_arguments import add_model_arguments, predictor_of
from fastamp.cli.options import add_key_values, at_least, dataset_argument
from fastamp.cli.source import evaluation_config, resolve_source
from fastamp.utils.errors import ConfigError

FORMATS = ("png", "pdf", "svg")
KINDS = ("rank-lists", "cmc", "roc", "histogram", "grad-cam", "curves")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser)
    parser.add_argument("--data", metavar="NAME", help="test dataset (default: DATASETS.TESTS of the run)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="kinds of figures (default: all)")
    parser.add_argument(
        "--num", type=at_least(1), default=6, metavar="N", help="queries per figure (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=at_least(1), default=10, metavar="K", help="gallery images per query (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random queries (default: %(default)s)")
    parser.add_argument(
        "--format", choices=FORMATS, default="png", help="file format of the figures (default: %(default)s)"
    )
    parser.add_argument(
        "--dpi",
        type=int,
        metavar="N",
        help="pixels per inch of PNG files, and of the images in PDF and SVG files (default: 120 for png, else 300)",
    )
    parser.add_argument("--output", metavar="DIR", help="output folder (default: pictures/ in the run folder)")
    add_key_values(parser, dest="key_values")


def run(args: argparse.Namespace) -> int:
    """Draw the figures and print the file names.

    Raises:
        UserError: if matplotlib is missing, the run, data or weights are invalid, or a file cannot be written.
    """
    from fastamp.evaluation import ReportOptions
    from fastamp.inference.visualize import draw_set, write
    from fastamp.report import read_history
    from fastamp.report.curves import health_panels, training_panels
    from fastamp.report.figures import new_figure, panel_figure

    dpi = args.dpi or (120 if args.format == "png" else 300)
    if not 20 <= dpi <= 1200:
        raise ConfigError(f"--dpi must be in 20..1200, got {dpi}.\n  fix: choose another value, e.g. 300")
    new_figure(1, 1)  # fails early if matplotlib is missing
    source = resolve_source(args.checkpoint)
    checkpoint = Path(
        source.checkpoint or evaluation_config(args.checkpoint, args.key_values, plugin=args.plugin)[0].MODEL.WEIGHTS
    )
    folder = Path(args.output) if args.output else checkpoint.parent / "pictures"
    kinds = set(args.kind)
    if "curves" in kinds:
        metrics = checkpoint.parent / "metrics.json"
        # Without an explicit --kind curves, a missing metrics.json is not an error.
        if metrics.exists() or kinds != set(KINDS):
            history = read_history(metrics)
            write(
                panel_figure(training_panels(history) + health_panels(history)),
                folder / f"curves.{args.format}",
                dpi=dpi,
            )
    if kinds - {"curves"}:
        predictor = predictor_of(args, args.key_values)
        for name in [args.data] if args.data else predictor.cfg.DATASETS.TESTS:
            options = ReportOptions(
                kinds=("best", "worst", "random"), lists=args.num, length=args.length, seed=args.seed
            )
            target = folder / re.sub(r"[^\w.-]+", "_", name)
            with dataset_argument("--data" if args.data else "DATASETS.TESTS"):
                draw_set(predictor, name, kinds, options, target, file_format=args.format, dpi=dpi)
    return 0
