"""Reading config files: safe YAML, one mapping a file, ``_BASE_`` files first."""

import os
import reprlib
from pathlib import Path
from typing import Any

import yaml

from fastamp.utils.errors import ConfigError
from fastamp.utils.files import check_not_device

BASE_KEY = "_BASE_"
LARGEST = 2**17
"""Bytes of a config file, which take some seconds to read; and values that its aliases may come to."""
# What PyYAML's constructors raise on text that is no valid value of its tag, e.g. `!!int x` or the date 2024-13-45.
_VALUE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that stands twice: YAML would drop the first without a word; and
    aliases of aliases, by which some lines come to values without end.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > LARGEST:
            raise yaml.constructor.ConstructorError(
                None, None, "its aliases come to values without end", node.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice in one section", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many values ``node`` comes to with its aliases followed, more than ``LARGEST`` for a circle."""
    if id(node) not in counted:
        counted[id(node)] = LARGEST + 1  # while it is being counted
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in children for each in pair]
        counted[id(node)] = 1 + sum(_values(child, counted) for child in children)
    return counted[id(node)]


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Return the mapping that YAML ``text`` holds; empty text is an empty mapping.

    Args:
        text: YAML; nothing in it is executed.
        source: where it comes from, for messages.

    Raises:
        ConfigError: the text is no valid YAML (with its line), has a tag such as ``!!python/...``, or is no mapping.
    """
    if len(text) > LARGEST:
        raise ConfigError(f"{source}: this has more than {LARGEST} characters; that is no config")
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        words = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        problem = ", ".join(filter(None, words)) or str(error)
        raise ConfigError(f"{source}{place}: this is no valid YAML for a config: {problem}") from error
    except _VALUE_ERRORS as error:
        raise ConfigError(f"{source}: this is no valid YAML for a config: {type(error).__name__}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected a mapping of config keys, got {type(content).__name__}")
    return content


def read_layers(path: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the mapping of a config file and of its ``_BASE_`` files, in the order in which they are merged.

    Args:
        path: a YAML file; ``~`` is the home folder.

    Returns:
        pairs of a file's path and its mapping without ``_BASE_``; the bases come first, the file itself last.

    Raises:
        ConfigError: a file is missing, unreadable, a ``.py`` file or no YAML mapping; ``_BASE_`` is no path or list
            of paths, or leads back to a file that is being read.
    """
    return _read(os.path.expanduser(os.fspath(path)), ())


def _read(path: str, chain: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Read ``path``, which the last file of ``chain`` names as its base."""
    if any(os.path.realpath(path) == os.path.realpath(opened) for opened in chain):
        raise ConfigError(f"{chain[-1]}: {BASE_KEY} goes in a circle: {' -> '.join((*chain, path))}")
    mapping = dict(parse_yaml(_read_text(path, chain), path))
    bases = mapping.pop(BASE_KEY, [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) and base and "\0" not in base for base in bases):
        raise ConfigError(f"{path}: {BASE_KEY} must be a path or a list of paths, got {reprlib.repr(bases)}")
    layers = []
    for base in bases:
        base_path = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        layers += _read(os.path.normpath(base_path), (*chain, path))
    return [*layers, (path, mapping)]


def _read_text(path: str, chain: tuple[str, ...]) -> str:
    named_by = f" ({BASE_KEY} of {chain[-1]})" if chain else ""
    if Path(path).suffix.lower() in (".py", ".pyc"):
        raise ConfigError(f"{path}{named_by}: a config is a YAML file; Python files are not run")
    try:
        check_not_device(Path(path))
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        hint = ""
        if Path(path).name == "Base-Strongerbaseline.yml":
            hint = "\n  fix: it is one of FastReID v0.1.1's base files; copy configs/Base-*.yml of that release there"
        raise ConfigError(f"{path}{named_by}: there is no such config file{_neighbours(path)}{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}{named_by}: this is a folder, not a config file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}{named_by}: this is no text in UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}{named_by}: cannot read this config file: {error}") from error


def _neighbours(path: str) -> str:
    """Return the config files of the folder that ``path`` names, as a hint."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f"; nor is there a folder {str(folder)!r}"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yml", ".yaml"))
    return f"\n  there are: {', '.join(names[:8])}" if names else ""
