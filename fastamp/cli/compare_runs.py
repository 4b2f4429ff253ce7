"""Compare the metrics of two runs on the same test set, with confidence intervals and a paired test.

A and B are run folders that were trained or evaluated with TEST.PER_QUERY=on. Intervals (95 %, bootstrap) and p values
(permutation test) are over the identities of the queries, and describe the choice of the test images, not that of the
seed of a training. `fastamp config diff A B` prints the differences of the configs.

examples:
  fastamp compare-runs logs/a logs/b
  fastamp compare-runs logs/a logs/b --ranks 1 20 --json
"""

import argparse
import json
from dataclasses import asdict

from fastamp.cli.options import at_least
from fastamp.utils.plural import plural
from fastamp.utils.table import format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    for name, letter in (("first", "A"), ("second", "B")):
        parser.add_argument(name, metavar=letter, help="run folder")
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        nargs="+",
        default=[1, 5, 10],
        metavar="K",
        help="ranks of Rank-k (default: 1 5 10)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compare two runs and print the differences of their metrics."""
    from fastamp.evaluation.run_comparison import compare_runs

    comparisons = compare_runs(args.first, args.second, ranks=args.ranks)
    if args.json:
        print(json.dumps([asdict(comparison) for comparison in comparisons]))
        return 0
    print(f"A: {args.first}\nB: {args.second}")
    for comparison in comparisons:
        rows = [
            [
                row.metric,
                f"{row.first:.2f}",
                f"{row.second:.2f}",
                f"{row.difference:+.2f}",
                f"{row.low:+.2f} to {row.high:+.2f}",
                f"{row.p_value:.2g}",
            ]
            for row in comparison.differences
        ]
        queries = plural(comparison.num_queries, "query", "queries")
        print(f"\n{comparison.name} (percent; {queries} of {comparison.num_identities} identities with a match)")
        print(format_table(rows, ["metric", "A", "B", "B - A", "95 % interval", "p"]))
        if all(comparison.protocols) and comparison.protocols[0] != comparison.protocols[1]:
            print("the evaluations differ:\n  A: {}\n  B: {}".format(*comparison.protocols))
    return 0
