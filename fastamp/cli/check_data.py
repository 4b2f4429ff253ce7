"""Check a dataset for errors before training on it.

Prints the numbers of images, identities and cameras, the columns, a histogram of image sizes, and all findings:
unreadable images, identities shared by training and test, queries without a match, duplicate images across splits,
numbers that differ from the published ones, and what would stop a run with the config, e.g. too few identities for the
sampler. Also writes a contact sheet and, with all occurrences,
findings.txt. Exit code: 0 if no error was found; 1 if a finding invalidates results, or would stop the run whose config
is given; 2 for an unknown or missing dataset.

examples:
  fastamp check-data Market1501
  fastamp check-data csv:my_images.csv --config-file Market1501/bagtricks_R50
  fastamp check-data csv:my_images.csv --write-clean clean.csv
  fastamp check-data my.yml
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tabulate import tabulate

from fastamp.cli.options import add_key_values, add_plugin_argument, dataset_argument
from fastamp.cli.source import is_source, training_config
from fastamp.utils.errors import ConfigError, writing
from fastamp.utils.files import folder_name
from fastamp.utils.terminal_text import sanitize_terminal_text

if TYPE_CHECKING:
    from fastamp.config import CfgNode
    from fastamp.data.datasets.base import ImageDataset
    from fastamp.diagnostics.findings import Report

_BAR = 40
_MAX_EXAMPLES = 5
# Sections whose keys on the command line describe a run, rather than the dataset and its protocol.
_RUN_SECTIONS = ("DATALOADER.", "INPUT.", "MODEL.", "SOLVER.")
_SINGULAR = {
    "numbers": "number",
    "identities": "identity",
    "images": "image",
    "lines": "line",
    "near-duplicates": "near-duplicate",
    "problems": "problem",
    "queries": "query",
    "splits": "split",
}


def text(report: "Report", *, max_examples: int | None = _MAX_EXAMPLES) -> str:
    """Format a report as text, with up to ``max_examples`` (None: all) examples of each finding."""
    blocks = [tabulate(report.rows, ["split", "images", "identities", "cameras"], tablefmt="github")]
    if report.columns:
        names = ["column", "type", "values", "missing", "examples"]
        rows = [(*row[:-1], row[-1] if len(row[-1]) <= _BAR else f"{row[-1][:_BAR]}...") for row in report.columns]
        blocks.append(tabulate(rows, names, tablefmt="github", disable_numparse=[0, 4]))
    if report.sizes:
        blocks.append(_histogram(report))
    for finding in report.findings:
        shown = finding.examples[:max_examples]
        rest = len(finding.examples) - len(shown)
        more = f"\n    and {rest} more" * bool(rest)
        word = "ERROR" if finding.is_error else "note"
        examples = "\n    ".join(example.replace("\n", "\n    ") for example in shown)
        fix = f"\n  fix: {finding.fix}" * bool(finding.fix)
        blocks.append(f"{word}: {_count(finding.count, finding.fault)}\n    {examples}{more}{fix}")
    blocks += [f"note: {note}" for note in report.notes]
    if not report.findings:
        blocks.append("no errors found")
    return "\n\n".join(blocks)


def _count(count: int, fault: str) -> str:
    """Prefix ``fault`` with the count; for a count of 1, in the singular. A fault without a plural has no count."""
    words = fault.split()
    noun = next((number for number, word in enumerate(words) if word in _SINGULAR), None)
    if noun is None:
        return fault
    if count == 1:
        words[noun] = _SINGULAR[words[noun]]
        words = ["its" if word == "their" else word for word in words]
    return f"{count} {' '.join(words)}"


def _histogram(report: "Report") -> str:
    """Format the histogram of image sizes as text."""
    total, common = sum(report.sizes.values()), report.sizes.most_common(8)
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
        "name",
        metavar="NAME",
        help="dataset as in DATASETS.NAMES: a registered name, csv:FILE or folder:FOLDER; or a recipe, YAML file, "
        "checkpoint or run folder, whose datasets are checked",
    )
    parser.add_argument(
        "--output",
        default="logs/check_data",
        metavar="DIR",
        help="output folder for the contact sheet and findings.txt (default: %(default)s)",
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
        help="images are near-duplicates if at most BITS of 256 bits of their hashes differ (default: 30; if all "
        "images are similar, their gray levels are compared)",
    )
    add_plugin_argument(parser)
    add_key_values(parser)


def run(args: argparse.Namespace) -> int:
    """Print the reports and write the contact sheets; return 1 if a finding is an error, else 0."""
    from fastamp.config import read_config

    clean = Path(args.write_clean).expanduser()
    if args.write_clean and clean.exists():
        raise ConfigError(f"--write-clean {clean}: this file exists already.\n  fix: choose another name")
    if not is_source(args.name):
        cfg = read_config(args.config_file, args.opts, plugin=args.plugin)
        recipe = args.config_file or "default config; add --config-file RECIPE to check the recipe of a run"
        return int(_check(args, args.name, cfg, recipe, Path(args.output)))
    cfg = training_config(argparse.Namespace(**vars(args), config_source=args.name))
    names = list(dict.fromkeys([*cfg.DATASETS.NAMES, *cfg.DATASETS.TESTS]))
    if args.write_clean and len(names) > 1:
        raise ConfigError(
            f"--write-clean needs one dataset; {args.name} has {', '.join(names)}.\n"
            "  fix: give the name of one dataset instead"
        )
    folders = [Path(args.output) / folder_name(name) if len(names) > 1 else Path(args.output) for name in names]
    checks = [_check(args, name, cfg, args.name, folder) for name, folder in zip(names, folders, strict=True)]
    return int(any(checks))


def _describe_training(dataset: "ImageDataset", cfg: "CfgNode") -> list[str]:
    """Describe what a training of ``cfg`` would repeat in a batch, and what it would not reach."""
    from fastamp.data.build import build_training_batches, describe_repeats
    from fastamp.engine.unreached import describe_unreached_events

    if (batches := build_training_batches(dataset, cfg)) is None:
        return []
    iters_per_epoch = -(-batches.iters_per_epoch // cfg.SOLVER.ACCUM_STEPS)
    return [note for note in (describe_repeats(batches), describe_unreached_events(cfg, iters_per_epoch)) if note]


def _check(args: argparse.Namespace, name: str, cfg: "CfgNode", recipe: str, folder: Path) -> bool:
    """Print the report on one dataset and write the contact sheet to ``folder``; return True if it has errors."""
    from fastamp.data.build import build_dataset, find_training_problems
    from fastamp.data.contact_sheet import contact_sheet
    from fastamp.data.datasets.custom import CsvDataset
    from fastamp.diagnostics.clean_dataset import write_clean
    from fastamp.diagnostics.data_check import check_dataset
    from fastamp.evaluation import Protocol

    with dataset_argument("dataset"):
        dataset = build_dataset(name, cfg, skip_invalid=True)
    protocol = Protocol.from_config(cfg)
    of_run = is_source(args.name)
    is_trained = not of_run or name in cfg.DATASETS.NAMES
    if of_run:  # of several training sets, one may have too few images on its own
        is_known = not is_trained or len(cfg.DATASETS.NAMES) == 1
    else:
        is_known = bool(args.config_file) or any(key.startswith(_RUN_SECTIONS) for key in args.opts[::2])
    report = check_dataset(
        dataset,
        max_pixels=cfg.INPUT.MAX_PIXELS,
        bit_depth=cfg.INPUT.BIT_DEPTH,
        near_duplicate_bits=args.near_duplicates,
        training_problems=find_training_problems(dataset, cfg, is_trained=is_trained),
        has_config=is_known,
        protocol=protocol,
    )
    if args.config_file or (of_run and (name,) == cfg.DATASETS.NAMES):
        report.notes.extend(_describe_training(dataset, cfg))
    title = f"{name}\nrun: {recipe}\n\n"
    print(sanitize_terminal_text(f"{title}{text(report)}\n"), flush=True)
    sheet, findings = folder / "contact_sheet.png", folder / "findings.txt"
    with writing(sheet):
        contact_sheet(dataset, sheet)
    with writing(findings):
        findings.write_text(f"{title}{text(report, max_examples=None)}\n", encoding="utf-8", errors="surrogateescape")
    print(f"wrote {sheet} and {findings} (with all occurrences)")
    if args.write_clean:
        clean = Path(args.write_clean).expanduser()
        count, excluded = write_clean(dataset, report, clean, protocol=protocol)
        invalid = len(dataset.invalid_lines) if isinstance(dataset, CsvDataset) else 0
        print(
            f"wrote {clean}: {_count(count, 'images')}; excluded {_count(excluded, 'images')} and "
            f"{_count(invalid, 'invalid lines')}"
        )
    return report.has_errors
