"""Look at a data set before training on it.

NAME is one of DATASETS.NAMES: a registered data set, csv:FILE or folder:FOLDER. Prints counts, sizes and what is wrong:
images that cannot be read, identities in training and test, queries without a match, copies across splits. Writes a
contact sheet. Exit code 1 when something would make results wrong, 2 for a wrong name or tree.
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
    """Return a report for people."""
    parts = [tabulate(report.rows, ["split", "images", "identities", "cameras"], tablefmt="github")]
    if report.sizes:
        parts.append(_histogram(report))
    for finding in report.findings:
        more = f"\n    and {finding.count - len(finding.examples)} more" * (finding.count > len(finding.examples))
        word = "ERROR" if finding.is_error else "note"
        parts.append(f"{word}: {finding.count} {finding.fault}\n    " + "\n    ".join(finding.examples) + more)
    if not report.findings:
        parts.append("nothing wrong was found")
    return "\n\n".join(parts)


def _histogram(report: "Report", *, lines: int = 8) -> str:
    """Return how many images are how large, in bars."""
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
    """Add the data set, and where its contact sheet goes."""
    parser.add_argument("name", metavar="NAME", help="as in DATASETS.NAMES")
    parser.add_argument("--output", default="logs/check_data", metavar="DIR", help="(default: %(default)s)")
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values")


def run(args: argparse.Namespace) -> int:
    """Print the report and write the contact sheet; 1 when something would make results wrong, else 0."""
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
