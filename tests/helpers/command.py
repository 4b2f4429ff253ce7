"""Run a command of the console script in this process."""

import argparse
from types import ModuleType


def run_command(module: ModuleType, *arguments: object) -> int:
    """Parse arguments, run the command, and return the exit code."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))
