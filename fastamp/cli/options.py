"""Options and the KEY VALUE grammar that several commands share."""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastamp.cli.source import is_source, model_source
from fastamp.utils.errors import ConfigError

_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[^=\s]+)?")
_NAME = re.compile(r"[A-Za-z][^=\s]*")
_NEGATIVE_NUMBER = re.compile(r"-\.?\d")


class _JoinPlugins(argparse.Action):
    """Join the plugins of several flags to one text, see ``load_plugin``."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = vars(namespace)[self.dest]
        setattr(namespace, self.dest, f"{given}{os.pathsep}{values}" if given else values)


def add_plugin_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugin``; the value is passed to ``read_config`` as ``plugin``."""
    parser.add_argument(
        "--plugin",
        dest="plugin",
        action=_JoinPlugins,
        default="",
        metavar="FILE",
        help="Python file that registers custom components and declares their config keys; may be given several times",
    )


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add SOURCE, ``--config-file`` and KEY VALUE, which ``finish_arguments`` completes."""
    parser.add_argument(
        "config_source",
        nargs="?",
        default="",
        metavar="SOURCE",
        type=model_source,
        help="recipe (see `fastamp recipes`), YAML file, checkpoint, run folder, or name of `fastamp models`",
    )
    parser.add_argument("--config-file", default="", metavar="FILE", help="recipe or YAML file, as in FastReID")
    add_key_values(parser)


def add_key_values(parser: argparse.ArgumentParser, *, dest: str = "opts") -> None:
    """Add the positional arguments KEY VALUE; add them after all other positional arguments."""
    parser.add_argument(
        dest,
        nargs="*",
        default=[],
        metavar="KEY VALUE",
        help="config keys and values, which override the config; also KEY=VALUE",
    )


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least ``lowest``, for argparse."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {lowest}, got {text!r}")
        return int(text)

    return number


@contextmanager
def dataset_argument(name: str) -> Iterator[None]:
    """Name the argument that the user typed, instead of DATASETS.NAMES, in errors about an unknown dataset."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        if not text.startswith("DATASETS.NAMES: "):
            raise
        raise ConfigError(f"{name}: {text.removeprefix('DATASETS.NAMES: ')}") from error


def is_key(word: str) -> bool:
    """Return True if a word is spelled as a config key, ``KEY`` or ``KEY=VALUE``, and is not an existing file."""
    return bool(_KEY.fullmatch(word.partition("=")[0])) and not os.path.exists(word)


def split_key_values(words: Sequence[str]) -> list[str]:
    """Convert words ``KEY VALUE`` and ``KEY=VALUE`` to ``[KEY, VALUE, ...]``.

    >>> split_key_values(["SEED", "1", "SOLVER.AMP=on"])
    ['SEED', '1', 'SOLVER.AMP', 'on']
    """
    pairs: list[str] = []
    waiting = list(words)
    while waiting:
        key, equals, value = waiting[0].partition("=")
        is_pair = bool(equals and _NAME.fullmatch(key))
        pairs += [key, value] if is_pair else waiting[:2]
        del waiting[: 1 if is_pair else 2]
    return pairs


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command; flags may stand between KEY VALUE pairs.

    The values of a flag with several values end at a flag, a KEY, or a word that is not a valid value. Without
    SOURCE, the first KEY is parsed as SOURCE; it is moved to KEY VALUE.
    """
    subcommands = next((action for action in parser._actions if action.nargs == argparse.PARSER), None)
    parsers = subcommands.choices if subcommands else None
    if subcommands and isinstance(parsers, dict) and argv and argv[0] in parsers:
        args = parse_arguments(parsers[argv[0]], argv[1:])
        return argparse.Namespace(**vars(args) | {subcommands.dest: argv[0]})
    with_lists = {name: item for item in parser._actions if item.nargs in ("+", "*") for name in item.option_strings}
    words: list[str] = []
    lists: list[list[str]] = []  # flags with several values
    in_list = False
    for word in argv:
        is_value = not word.startswith("-") or _NEGATIVE_NUMBER.match(word)
        if word in with_lists and word != "--opts":
            lists.append([word])
            in_list = True
        elif in_list and is_value and not is_key(word) and _accepts(with_lists[lists[-1][0]], word, lists[-1]):
            lists[-1].append(word)
        elif words and _NEGATIVE_NUMBER.match(word) and is_key(words[-1]) and "=" not in words[-1]:
            words[-1] += f"={word}"  # argparse would parse the value in SOLVER.BIAS -1e-3 as a flag
        else:
            words.append(word)
            in_list = False
    words += [word for texts in lists for word in texts]
    try:
        args = parser.parse_intermixed_args(words)
    except TypeError:  # not supported with subcommands and argparse.REMAINDER
        args = parser.parse_args(words)
    values = vars(args)
    if values.get("config_source") and is_key(values["config_source"]):
        values |= {"config_source": "", "opts": [values["config_source"], *values["opts"]]}
    values |= {name: split_key_values(values[name]) for name in ("opts", "key_values") if name in values}
    if "config_source" in values:
        _check_order(parser, values["config_source"], values.get("opts", [])[::2])
    return argparse.Namespace(**values)


def _check_order(parser: argparse.ArgumentParser, source: str, keys: Sequence[str]) -> None:
    """Report a SOURCE in the place of a key."""
    other = next((key for key in keys if not _KEY.fullmatch(key) and is_source(key)), "")
    if other and source:
        parser.error(f"got two SOURCE arguments: {source} and {other}.\n  fix: remove one of them")
    if other:
        parser.error(f"SOURCE is not first: {other}.\n  fix: write {other} before the KEY VALUE pairs")


def _accepts(flag: argparse.Action, word: str, before: Sequence[str]) -> bool:
    """Return True if a word is a valid value of a flag, or the first value, so that argparse reports an invalid one."""
    if len(before) == 1:
        return True
    try:
        value = flag.type(word) if callable(flag.type) else word
    except (argparse.ArgumentTypeError, TypeError, ValueError):
        return False
    return flag.choices is None or value in flag.choices
