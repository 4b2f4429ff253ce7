"""Console script `fastamp`: one module per command, imported on demand."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from fastamp.utils.color import color_help, color_message, has_color, paint
from fastamp.utils.command_line import run_command_line
from fastamp.utils.errors import USER_ERROR_EXIT_CODE, ConfigError, UserError, did_you_mean
from fastamp.utils.files import ignore_closed_stdout

COMMANDS = {
    "demo": "train on a generated dataset: the quickstart, without downloads",
    "recipes": "list the installed recipes, or print one",
    "models": "list published weights by name, or describe one",
    "init": "create a project folder: config, custom component and README",
    "train": "train a model",
    "finetune": "fine-tune a model on your own images, from its weights file",
    "eval": "evaluate a model on test datasets",
    "extract": "extract the features of images to a file",
    "gallery": "add, remove and list the images of a mutable gallery",
    "search": "search a gallery for the images that are most similar to a query",
    "serve": "answer HTTP requests: features, comparison, and search in a mutable gallery",
    "cluster": "group images into identities, without labels",
    "compare": "compute the similarity of two images",
    "compare-runs": "compare the metrics of two runs, with intervals and a paired test",
    "compare-models": "compare models on a test set: accuracy, latency, throughput, size",
    "reproduce": "compare a published result with your own, for a published file or a recipe",
    "track": "track detections through a video, and find the boxes of each identity",
    "calibrate": "choose thresholds for wanted error rates: same, different or unknown",
    "visualize": "draw rank lists, curves and similarity maps",
    "export": "export a model to ONNX or torch.export",
    "push": "package a model with a model card, and upload it to the Hugging Face Hub",
    "strip": "remove the training state from a checkpoint",
    "import": "convert weights of FastReID, torchreid or TransReID to a checkpoint",
    "evaluate-features": "evaluate features saved by any program",
    "doctor": "check whether a model and a machine support mixed precision",
    "replay": "replay a failed training step from a crash dump",
    "check-data": "check a dataset for errors",
    "split": "split photographs of animals by identity, time or encounter, without leaks",
    "config": "list and explain config keys; print, compare and convert configs",
    "schema": "print the JSON Schema of config files, for editors",
    "tune": "search hyperparameters with Ray Tune",
    "benchmark": "measure speed and memory on this machine",
    "completion": "print a script that completes commands in bash and zsh",
    "help": "print this help, or the help of a command",
    "version": "print versions, for bug reports",
}
_MODULES = {"import": "import_checkpoint"}  # other commands: the name with underscores
_INTRODUCTION = """usage: fastamp COMMAND [SOURCE] [KEY VALUE ...] [--flags]

SOURCE is a recipe, YAML file, checkpoint, run folder or name of published weights.
Flags may stand anywhere; KEY=VALUE is the same as KEY VALUE.

commands:"""
_EXAMPLES = """
examples:
  fastamp demo
  fastamp train Market1501/sbs_R50-ibn SOLVER.AMP=on
  fastamp eval logs/run
  fastamp help train"""


class _Parser(argparse.ArgumentParser):
    """Argument parser with colors, and with a hint for misspelled flags."""

    def print_help(self, file: Any = None) -> None:
        file = file or sys.stdout
        file.write(color_help(self.format_help(), file))

    def error(self, message: str) -> NoReturn:
        from fastamp.cli.options import is_key

        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        if is_key(unknown.lstrip("-")):
            message += f".\n  fix: write config keys without dashes: {unknown.lstrip('-')}"
        elif unknown.startswith("-"):
            name, flags = unknown.lstrip("-"), self._option_string_actions  # the dashes are similar in all flags
            message += "." + did_you_mean(unknown, [flag for flag in flags if did_you_mean(name, [flag.lstrip("-")])])
        self.print_usage(sys.stderr)
        self.exit(USER_ERROR_EXIT_CODE, color_message(f"{self.prog}: error: {message}\n", sys.stderr))


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
        print(color_message(f"error: {error}", sys.stderr), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:  # during an import; run_command_line handles that of a command
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _run(command: str, *words: str) -> int:
    if command == "help" and words and words[0] not in ("-h", "--help"):
        command, words = words[0], ("--help",)
    if command in ("", "-h", "--help", "help"):
        print(_help())
        return 0 if command else USER_ERROR_EXIT_CODE
    if command in ("--version", "version"):
        print(_versions())
        return 0
    if command not in COMMANDS and command not in commands():
        hint = did_you_mean(command, commands())
        message = f"error: unknown command {command!r}.{hint}\n  commands: {', '.join(commands())}"
        print(color_message(message, sys.stderr), file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return run_command(command, list(words), program=f"fastamp {command}")


def commands() -> dict[str, str]:
    """Return all commands, those of plugins last: name -> line of help.

    Raises:
        ConfigError: if a plugin declares a command of fastamp.
    """
    from fastamp.config.plugin_tables import read_tables  # a command of fastamp does not need it

    declared = read_tables("COMMANDS")
    for name in COMMANDS.keys() & declared.keys():
        raise ConfigError(f"{declared[name].file}: COMMANDS: {name!r} is a command of fastamp.\n  fix: rename it")
    return COMMANDS | {name: command.help for name, command in declared.items()}


def run_command(command: str, argv: Sequence[str] | None = None, *, program: str | None = None) -> int:
    """Run a command and return the exit code of the command.

    Args:
        command: name of the command.
        argv: arguments of the command. Default None: ``sys.argv[1:]``.
        program: program name to show in the help. Default None: name of the script that is running.

    Raises:
        SystemExit: if an argument is invalid, if ``--help`` is given, or if a child process failed.
    """
    from fastamp.cli.options import parse_arguments
    from fastamp.cli.source import with_published_files

    module = command_module(command)
    parser = command_parser(command, program)
    with ignore_closed_stdout():  # of the help
        args = parse_arguments(parser, sys.argv[1:] if argv is None else argv)
    codes = [0]
    return run_command_line(lambda: codes.append(module.run(with_published_files(parser, args)))) or codes[-1]


def command_parser(command: str, program: str | None = None) -> argparse.ArgumentParser:
    """Build the argument parser of a command; for the arguments, see ``run_command``."""
    from fastamp.cli.source import add_accept_withdrawn

    module = command_module(command)
    parser = _Parser(prog=program, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    add_accept_withdrawn(parser)
    return parser


def command_module(command: str) -> ModuleType:
    """Import the module of a command. It has the functions ``add_arguments`` and ``run``."""
    if command not in COMMANDS:
        from fastamp.config.plugin_tables import read_tables

        module: ModuleType = read_tables("COMMANDS")[command].load()
        return module
    return importlib.import_module(f"fastamp.cli.{_MODULES.get(command, command.replace('-', '_'))}")


def _help() -> str:
    meanings = commands()
    width = max(map(len, meanings))
    colored = has_color(sys.stdout)
    names = {name: paint(f"{name:<{width}}", "cyan") if colored else f"{name:<{width}}" for name in meanings}
    lines = [_INTRODUCTION, *(f"  {names[name]}  {meaning}" for name, meaning in meanings.items()), _EXAMPLES]
    return color_help("\n".join(lines), sys.stdout)


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
