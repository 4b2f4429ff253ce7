"""Print a script that completes commands, flags, recipes, config keys and files in bash and zsh.

examples:
  fastamp completion > ~/.fastamp_completion && echo 'source ~/.fastamp_completion' >> ~/.bashrc
  eval "$(fastamp completion)"
"""

import argparse

_SCRIPT = """# Completion of fastamp for bash and zsh: eval "$(fastamp completion)"
[ -n "$ZSH_VERSION" ] && autoload -U +X compinit bashcompinit && compinit -u && bashcompinit
_fastamp_flags() {
  case "$1" in
%(flags)s
  esac
}
_fastamp() {
  local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""
  case "$COMP_CWORD:$command:$current" in
    1:*) words="%(commands)s" ;;
    2:help:*) words="%(commands)s" ;;
    *:*:-*) words="$(_fastamp_flags "$command")" ;;
    2:config:*) words="list explain show diff convert" ;;
    2:benchmark:*) words="%(benchmarks)s" ;;
    *:*:[A-Z]*) words="%(recipes)s
%(keys)s" ;;
    *) words="%(recipes)s" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _fastamp fastamp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from fastamp.cli import command_parser, commands
    from fastamp.config import get_cfg
    from fastamp.config.recipes import list_recipes
    from fastamp.utils.resources import resource_folder

    flags, names = [], commands()
    for command in names:
        if command not in ("help", "version"):
            options = (option for action in command_parser(command)._actions for option in action.option_strings)
            flags.append(
                f"    {command}) echo '{' '.join(option for option in options if option.startswith('--'))}' ;;"
            )
    words = {
        "commands": names,
        "benchmarks": sorted(path.stem for path in resource_folder("tools/benchmark").glob("*.py")),
        "recipes": list_recipes(),
        "keys": [key.path for key, _ in get_cfg().keys_below()],
    }
    print(
        _SCRIPT % {"flags": "\n".join(flags), **{name: " ".join(candidates) for name, candidates in words.items()}},
        end="",
    )
    return 0
