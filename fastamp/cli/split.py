"""Split photographs of individual animals into training, database and query images, without leaks.

Writes the table again with a column split, and prints a summary and a leak check. closed: all query identities are in
the database. open: some are unknown. disjoint: no test identity is in the training set. time: each identity's first
days are for training. year: images from that year on are queries. encounter: whole encounters are on one side.
Images of the database are training images and gallery images. Exit code: 0 if no leak was found, 1 if images that are
almost the same are on both sides, 2 for invalid input.

examples:
  fastamp split animals.csv --by time --out split.csv
  fastamp split animals.csv --by encounter --unknown 0.1 --validation 0.2 --out split.csv
  fastamp split animals.csv --by disjoint --unknown 0.3 --identity name,side --near-duplicates --out split.csv
"""

import argparse
import shlex
from pathlib import Path

from tabulate import tabulate

from fastamp.utils.terminal_text import sanitize_terminal_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("table", metavar="TABLE.csv", help="CSV file with the columns path and pid, one image per line")
    parser.add_argument(
        "--by",
        required=True,
        choices=("closed", "open", "disjoint", "time", "year", "encounter"),
        help="kind of split, see above",
    )
    parser.add_argument("--out", required=True, metavar="OUT.csv", help="CSV file to write")
    parser.add_argument(
        "--train",
        type=float,
        default=None,
        metavar="FRACTION",
        help="fraction for training: of each identity's images (closed; default 0.8), of all images (open; 0.8), of "
        "each identity's days (time; 0.5) or encounters (encounter; 0.5)",
    )
    parser.add_argument(
        "--unknown",
        type=float,
        default=None,
        metavar="FRACTION",
        help="fraction of the images whose identities are not in the training set: open, disjoint (default 0.1), "
        "time and encounter (0)",
    )
    parser.add_argument("--year", type=int, default=None, metavar="YEAR", help="first year of the queries, for year")
    parser.add_argument(
        "--validation",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of the identities that are held out from training, to choose the threshold for new individuals "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        default="pid",
        metavar="COLUMNS",
        help="columns whose values together are the identity, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--date", default="date", metavar="COLUMN", help="column of the dates (default: %(default)s)")
    parser.add_argument(
        "--encounter", default="encounter", metavar="COLUMN", help="column of the encounters (default: %(default)s)"
    )
    parser.add_argument(
        "--group", default="", metavar="COLUMN", help="keep an identity's images with the same value on one side"
    )
    parser.add_argument(
        "--near-duplicates",
        nargs="?",
        type=int,
        const=-1,
        metavar="BITS",
        help="read the images and keep the near-duplicates of an identity on one side; see fastamp check-data for BITS",
    )
    parser.add_argument(
        "--unlabeled",
        default="unknown",
        metavar="NAME",
        help="further name of unknown identities, whose images are excluded, as those of -1, nan, none, null and ? are "
        "(default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=666, help="seed of the split (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the table and print the summary; return 1 if there is a leak, else 0."""
    from fastamp.data.split_table import SplitOptions, split_table
    from fastamp.utils.errors import ConfigError

    if args.by == "year" and args.year is None:
        raise ConfigError("--by year needs --year.\n  fix: add --year YEAR, the first year of the query images")
    options = SplitOptions(
        method=args.by,
        identity=tuple(name.strip().lower() for name in args.identity.split(",")),
        train=(0.8 if args.by in ("closed", "open") else 0.5) if args.train is None else args.train,
        unknown=args.unknown,
        year=args.year or 0,
        encounter=args.encounter,
        date=args.date,
        group=args.group,
        near_duplicates=args.near_duplicates is not None,
        near_duplicate_bits=args.near_duplicates if (args.near_duplicates or 0) >= 0 else None,
        validation=args.validation,
        seed=args.seed,
        unlabeled=args.unlabeled,
    )
    out = Path(args.out).expanduser()
    report = split_table(Path(args.table).expanduser(), out, options)
    words = {True: "LEAK", False: "ok  ", None: "note"}
    leaks = [f"{words[is_leak]} {text}" for text, is_leak in report.leaks.items()]
    lines = [
        tabulate(report.rows, ["split", "images", "identities"], tablefmt="github"),
        "",
        *(f"note: {note}" for note in report.notes),
        *leaks,
        f"wrote {out}",
    ]
    print(sanitize_terminal_text("\n".join(lines)))
    has_leak = any(report.leaks.values())
    if has_leak:
        print("fix: split by encounter or time, or add --group COLUMN or --near-duplicates")
    identity = "" if args.identity == "pid" else f" DATASETS.CSV.IDENTITY='[{args.identity}]'"
    print(f"next: fastamp check-data {shlex.quote(f'csv:{out}')}{identity}")
    return int(has_leak)
