"""Measure speed and memory on this machine; each benchmark has its own options.

examples:
  fastamp benchmark
  fastamp benchmark backbones --help
  fastamp benchmark train_step
"""

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

from fastamp.utils.errors import check_choice
from fastamp.utils.resources import resource_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="benchmark to run (default: list them)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the benchmark")


def run(args: argparse.Namespace) -> int:
    """Run a benchmark in a new process and return its exit code; without NAME, list the benchmarks.

    Raises:
        ConfigError: if there is no such benchmark.
    """
    files = {path.stem: path for path in sorted(resource_folder("tools/benchmark").glob("*.py"))}
    if not args.name:
        width = max(map(len, files))
        print("\n".join(f"{name:<{width}}  {_summary(path)}" for name, path in files.items()))
        return 0
    check_choice("benchmark", args.name, list(files))
    # A new process, because some benchmarks start copies of themselves and measure the memory of the process.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(files[args.name]), *args.arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def _summary(path: Path) -> str:
    """Return the first line of a script's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
