"""Console script `fastamp`: one module per command, imported on demand."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from fastamp.utils.errors import USER_ERROR_EXIT_CODE, UserError, did_you_mean
from fastamp.utils.files import ignore_closed_stdout

COMMANDS = {
    "train": "train a model",
    "eval": "evaluate a model on test datasets",
    "extract": "extract the features of images to a file",
    "search": "search a gallery for the images that are most similar to a query",
    "compare": "compute the similarity of two images",
    "visualize": "draw rank lists, curves and similarity maps",
    "export": "export a model to ONNX or torch.export",
    "strip": "remove the training state from a checkpoint",
    "doctor": "check whether a model and a machine support mixed precision",
    "check-data": "check a dataset for errors",
    "config": "list and explain config keys; compare and convert configs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastamp COMMAND ...`.

    Args:
        argv: arguments after `fastamp`. Default None: ``sys.argv[1:]``.

    Returns:
        The exit code: 0 on success, 1 if a check failed, 2 for invalid input, 128 + n after signal n.
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
        hint = did_you_mean(command, COMMANDS)
        print(f"error: unknown command {command!r}.{hint}\n  commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return run_command(command, list(words), program=f"fastamp {command}")


def run_command(command: str, argv: Sequence[str] | None = None, *, program: str | None = None) -> int:
    """Run one of the commands in ``COMMANDS`` and return the exit code of the command.

    Args:
        command: name of the command.
        argv: arguments of the command. Default None: ``sys.argv[1:]``.
        program: program name to show in the help. Default None: name of the script that is running.

    Raises:
        SystemExit: if an argument is invalid, if ``--help`` is given, or if a child process failed.
    """
    module = _module(command)
    parser = argparse.ArgumentParser(
        prog=program, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    with ignore_closed_stdout():  # of the help
        try:
            args = parser.parse_intermixed_args(argv)  # allows options between KEY VALUE pairs
        except TypeError:  # not supported with argparse.REMAINDER or subcommands
            args = parser.parse_args(argv)
    from fastamp.engine import run_command_line  # imports PyTorch, which --help does not need

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
    """Return the versions of fastamp and its dependencies, and the availability of a GPU, as text."""
    from fastamp.diagnostics import environment_queries

    cuda = environment_queries.cuda_error()
    return "\n".join(
        [
            *(f"{name} {version}" for name, version in environment_queries.versions().items()),
            f"PyTorch built for {environment_queries.build() or 'CPU only'}; "
            + (f"no GPU ({cuda})" if cuda else "GPU available"),
        ]
    )
