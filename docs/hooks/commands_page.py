"""Reference of the commands: arguments and examples from the argument parsers."""

import argparse

from markdown_text import escape, table

from fastamp.cli import command_module, command_parser, commands

_INTRODUCTION = """# Commands

After this page you know each command of `fastamp` with its arguments. `fastamp help COMMAND` prints the same text.

```text
fastamp COMMAND [SOURCE] [KEY VALUE ...] [--flags]
```

SOURCE is a recipe, YAML file, checkpoint or run folder. Flags may stand anywhere, and `KEY=VALUE` is the same as
`KEY VALUE`. The exit code is 0 on success, 1 if a check or the run failed, 2 for invalid input, and 128 + n after
signal n. The former scripts in `tools/` take the same arguments.
"""
_WITHOUT_MODULE = ("help", "version")


def commands_page() -> str:
    """Return the page as Markdown, with one section per command."""
    return "\n".join([_INTRODUCTION, *(_command(name, meaning) for name, meaning in commands().items())])


def _command(name: str, meaning: str) -> str:
    lines = [f"## fastamp {name} {{ #{name} }}\n"]
    if name in _WITHOUT_MODULE:
        return "\n".join([*lines, f"{meaning[0].upper()}{meaning[1:]}.\n"])
    text, _, examples = (command_module(name).__doc__ or "").partition("\nexamples:\n")
    lines.append(f"{escape(text.strip())}\n")
    if examples:
        shown = "\n".join(line.strip() for line in examples.rstrip().splitlines())
        lines.append(f"```sh\n{shown}\n```\n")
    parser = command_parser(name, f"fastamp {name}")
    lines.append(_arguments(parser))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                lines.append(f"### fastamp {name} {choice.dest} {{ #{name}-{choice.dest} }}\n")
                lines += [f"{escape((choice.help or '').capitalize())}.\n", _arguments(action.choices[choice.dest])]
    return "\n".join(lines)


def _arguments(parser: argparse.ArgumentParser) -> str:
    """Return a table of the arguments of a parser, without ``--help``; empty if there are none."""
    formatter = argparse.HelpFormatter(parser.prog)
    rows = [
        (f"`{formatter._format_action_invocation(action)}`", escape(formatter._expand_help(action)))
        for action in parser._actions
        if action.help not in (None, argparse.SUPPRESS) and "--help" not in action.option_strings
    ]
    return table(("argument", "meaning"), rows) if rows else ""
