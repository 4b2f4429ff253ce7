"""Check a dataset for errors before training on it.

Prints the numbers of images, identities and cameras, a histogram of image sizes, and all findings: unreadable images,
identities shared by training and test, queries without a match, duplicate images across splits. Also writes a contact
sheet. Exit code: 0 if no error was found, 1 if a finding invalidates results, 2 for an unknown or missing dataset.

examples:
  fastamp check-data Market1501
  fastamp check-data csv:my_images.csv --output logs/check
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from fastamp.cli.options import add_plugin_argument
from fastamp.utils.errors import writing
from fastamp.utils.terminal_text import sanitize_terminal_text

if TYPE_CHECKING:
    from fastamp.data.check import Report

_BAR = 40


def text(report: "Report") -> str:
    """Format a report as text."""
    blocks = [tabulate(report.rows, ["split", "images", "identities", "cameras"], tablefmt="github")]
    if report.sizes:
        blocks.append(_histogram(report))
    for finding in report.findings:
        more = f"\n    and {finding.count - len(finding.examples)} more" * (finding.count > len(finding.examples))
        word = "ERROR" if finding.is_error else "note"
        blocks.append(f"{word}: {finding.count} {finding.fault}\n    " + "\n    ".join(finding.examples) + more)
    if not report.findings:
        blocks.append("no errors found")
    return "\n\n".join(blocks)


def _histogram(report: "Report", *, lines: int = 8) -> str:
    """Format the histogram of image sizes as text."""
    total, common = sum(report.sizes.values()), report.sizes.most_common(lines)
    rest = total - sum(count for _, count in common)
    rows = [(f"{width} x {height}", count) for (width, height), count in common]
    rows += [(f"{len(report.sizes) - len(common)} other sizes", rest)] if rest else []
    widths, heights = zip(*report.sizes, strict=True)
    table = tabulate(
        [[name, count, "#" * max(1, round(_BAR * count / total))] for name, count in rows],
        ["width x height", "images", ""],
        tablefmt="github",
    )
    return f"{table}\nwidths {min(widths)} to {max(widths)}, heights {min(heights)} to {max(heights)} pixels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "name", metavar="NAME", help="dataset, as in DATASETS.NAMES: a registered name, csv:FILE or folder:FOLDER"
    )
    parser.add_argument(
        "--output",
        default="logs/check_data",
        metavar="DIR",
        help="output folder for the contact sheet (default: %(default)s)",
    )
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")


def run(args: argparse.Namespace) -> int:
    """Print the report and write the contact sheet; return 1 if a finding is an error, else 0."""
    from fastamp.config import read_config
    from fastamp.data.build import build_dataset
    from fastamp.data.check import check_dataset, contact_sheet

    cfg = read_config("", args.opts, plugin=args.plugin)
    dataset = build_dataset(args.name, cfg)
    report = check_dataset(dataset, max_pixels=cfg.INPUT.MAX_PIXELS)
    print(sanitize_terminal_text(f"{args.name}\n\n{text(report)}\n"), flush=True)
    sheet = Path(args.output) / "contact_sheet.png"
    with writing(sheet):
        contact_sheet(dataset, sheet)
    print(f"wrote {sheet}")
    return int(report.has_errors)
