"""Run commands of the console script and load scripts in this process."""

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def run_command(module: ModuleType, *arguments: object) -> int:
    """Parse arguments, run the command, and return the exit code."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))


def load_script(path: str) -> ModuleType:
    """Import a file of the repository, which is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
