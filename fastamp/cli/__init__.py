"""The console script `fastamp`: one command a module, which is imported when it is asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from fastamp.utils.errors import USER_ERROR_EXIT_CODE, UserError, did_you_mean
from fastamp.utils.files import ignore_closed_stdout

COMMANDS = {
    "train": "train the model that a config file describes",
    "eval": "evaluate weights on the test sets of a config",
    "extract": "write the features of images to a file",
    "search": "find the nearest of many images",
    "compare": "say how similar two images are",
    "visualize": "draw rank lists, curves and what a model looks at",
    "export": "write a model as ONNX or torch.export",
    "strip": "write a checkpoint without its training state",
    "doctor": "examine the mixed precision of a machine and a model",
    "check-data": "look for what is wrong with a data set",
    "config": "list and explain config keys, compare and convert configs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastamp COMMAND ...` and return its exit code: 0 done, 2 the input was wrong.

    Args:
        argv: the words after `fastamp`; None takes those of this process.
    """
    try:
        with ignore_closed_stdout():
            return _run(*((sys.argv[1:] if argv is None else argv) or [""]))
    except UserError as error:  # raised by an import; run_command_line handles those of a command
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return 0


def _run(command: str, *words: str) -> int:
    if command in ("", "-h", "--help"):
        print(_help())
        return 0 if command else USER_ERROR_EXIT_CODE
    if command == "--version":
        print(_versions())
        return 0
    if command not in COMMANDS:
        near = did_you_mean(command, COMMANDS)
        print(f"error: {command!r} is no command.{near}\n  commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return run_command(command, list(words), program=f"fastamp {command}")


def run_command(command: str, argv: Sequence[str] | None = None, *, program: str | None = None) -> int:
    """Run one of ``COMMANDS`` and return its exit code.

    Args:
        command: its name.
        argv: its arguments; None takes those of this process.
        program: what the help calls it; None is the name of the file that runs.

    Raises:
        SystemExit: the arguments are no such command's, help was asked for, or a process that was started failed.
    """
    module = _module(command)
    parser = argparse.ArgumentParser(
        prog=program, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    with ignore_closed_stdout():  # of the help
        try:
            args = parser.parse_intermixed_args(argv)  # options may stand before, between and after KEY VALUE pairs
        except TypeError:  # not where the pairs are all that is left, or there are subcommands
            args = parser.parse_args(argv)
    from fastamp.engine import run_command_line  # imports PyTorch, which the help has no need of

    codes = [0]
    return run_command_line(lambda: codes.append(module.run(args))) or codes[-1]


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"fastamp.cli.{command.replace('-', '_')}")


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: fastamp COMMAND ...",
            "       fastamp COMMAND --help",
            "       fastamp --version",
            "",
            *(f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()),
        ]
    )


def _versions() -> str:
    """Return the versions of fastamp and of what it stands on, and whether there is a GPU."""
    from fastamp.diagnostics import environment_queries

    cuda = environment_queries.cuda_error()
    return "\n".join(
        [
            *(f"{name} {version}" for name, version in environment_queries.versions().items()),
            f"built for {environment_queries.build() or 'CPU only'}; {f'no GPU ({cuda})' if cuda else 'GPU available'}",
        ]
    )
