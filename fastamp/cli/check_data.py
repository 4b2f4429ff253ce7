"""Check a dataset for errors before training on it.

Prints the numbers of images, identities and cameras, a histogram of image sizes, and all findings: unreadable images,
identities shared by training and test, queries without a match, duplicate images across splits, and what would stop a
run with the config, e.g. too few identities for the sampler. Also writes a contact sheet. Exit code: 0 if no error was
found, 1 if a finding invalidates results, 2 for an unknown or missing dataset.

examples:
  fastamp check-data Market1501
  fastamp check-data csv:my_images.csv --config-file configs/Market1501/bagtricks_R50.yml
  fastamp check-data csv:my_images.csv --write-clean clean.csv
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from fastamp.cli.options import add_plugin_argument
from fastamp.utils.errors import ConfigError, writing
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
        examples = "\n    ".join(example.replace("\n", "\n    ") for example in finding.examples)
        fix = f"\n  fix: {finding.fix}" * bool(finding.fix)
        blocks.append(f"{word}: {finding.count} {finding.fault}\n    {examples}{more}{fix}")
    blocks += [f"note: {note}" for note in report.notes]
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
    parser.add_argument(
        "--config-file", default="", metavar="FILE", help="recipe of the run (default: the default config)"
    )
    parser.add_argument(
        "--write-clean",
        default="",
        metavar="OUT.csv",
        help="write a CSV file without the images of the errors, without invalid lines and without repeated images",
    )
    parser.add_argument(
        "--near-duplicates",
        type=int,
        metavar="BITS",
        help="images are near-duplicates if at most BITS of 256 bits of their hashes differ (default: 30, fewer if all "
        "images are similar)",
    )
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and values")


def run(args: argparse.Namespace) -> int:
    """Print the report and write the contact sheet; return 1 if a finding is an error, else 0."""
    from fastamp.config import read_config
    from fastamp.data.build import build_dataset, find_training_problems
    from fastamp.data.check import check_dataset, contact_sheet, write_clean

    clean = Path(args.write_clean).expanduser()
    if args.write_clean and clean.exists():
        raise ConfigError(f"--write-clean {clean}: this file exists already.\n  fix: choose another name")
    cfg = read_config(args.config_file, args.opts, plugin=args.plugin)
    dataset = build_dataset(args.name, cfg, skip_invalid=True)
    report = check_dataset(
        dataset,
        max_pixels=cfg.INPUT.MAX_PIXELS,
        near_duplicate_bits=args.near_duplicates,
        training_problems=find_training_problems(dataset, cfg),
    )
    checked = f"run: {args.config_file or 'default config; add --config-file RECIPE.yml to check the recipe of a run'}"
    print(sanitize_terminal_text(f"{args.name}\n{checked}\n\n{text(report)}\n"), flush=True)
    sheet = Path(args.output) / "contact_sheet.png"
    with writing(sheet):
        contact_sheet(dataset, sheet)
    print(f"wrote {sheet}")
    if args.write_clean:
        count, excluded = write_clean(dataset, report, clean)
        invalid = len(getattr(dataset, "invalid_lines", ()))
        print(f"wrote {clean}: {count} images; excluded {excluded} images and {invalid} invalid lines")
    return int(report.has_errors)
