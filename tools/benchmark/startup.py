#!/usr/bin/env python
"""Measure the run time of commands that only parse their arguments.

python tools/benchmark/startup.py                 # this checkout
python tools/benchmark/startup.py OTHER_CHECKOUT  # and another checkout, e.g. a git worktree of an earlier version
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "-m fastamp --help",
    "-m fastamp train --help",
    "-m fastamp config --help",
    "-m fastamp search --help",
    "-m fastamp search only-one-word",
    "-m fastamp --version",
    "tools/train_net.py --help",
    "tools/train_net.py --num-gpus x",
)


def measure(root: Path, command: str, runs: int) -> tuple[float, float]:
    """Return the minimum CPU time and wall time over ``runs`` runs, in seconds."""
    cpu, wall = [], []
    for _ in range(runs):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": str(root)}
        subprocess.run([sys.executable, *command.split()], cwd=root, env=environment, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - start)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(cpu), min(wall)


def main() -> None:
    """Run all commands and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, metavar="CHECKOUT", help="other checkouts to compare with")
    parser.add_argument(
        "--runs", type=int, default=3, help="number of runs, of which the fastest counts (default: %(default)s)"
    )
    args = parser.parse_args()
    roots = [*args.roots, ROOT]
    rows = []
    for command in COMMANDS:
        row = [command]
        for root in roots:
            row += [f"{seconds:.2f}" for seconds in measure(root.resolve(), command, args.runs)]
        rows.append(row)
    headers = ["command", *(f"{root.resolve().name} {what}" for root in roots for what in ("CPU s", "wall s"))]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
