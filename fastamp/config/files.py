"""Safe reading of YAML config files and of the base files that they list in ``_BASE_``."""

import os
import reprlib
from pathlib import Path
from typing import Any

import yaml

from fastamp.config.recipes import find_recipe, list_recipes, recipe_name
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.files import FORMAT_KEY, check_format, check_not_device

BASE_KEY = "_BASE_"
FOLDERS_KEY = "fastamp_folders"
"""Entry of a saved config: the folders in which its runs were started."""
FORMAT = 1
"""Number of the format of the config of a run; a change that earlier releases cannot read increases it."""
LARGEST = 2**17
"""Maximum size of a config file in bytes (parsed in a few seconds), and maximum number of values after expanding its
YAML aliases.
"""
# Raised by PyYAML's constructors for a value that is invalid for its tag, e.g. `!!int x` or the date 2024-13-45.
_VALUE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys and excessive aliases.

    PyYAML silently keeps only the last of several duplicate keys. Nested aliases are rejected if they expand to more
    than ``LARGEST`` values ("billion laughs").
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _values(node, {}) > LARGEST:
            raise yaml.constructor.ConstructorError(
                None, None, f"the aliases expand to more than {LARGEST} values", node.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key_node.value!r}", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Count the values below ``node`` with aliases expanded; more than ``LARGEST`` if an alias contains itself."""
    if id(node) not in counted:
        counted[id(node)] = LARGEST + 1  # while it is being counted
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [node for pair in children for node in pair]
        counted[id(node)] = 1 + sum(_values(child, counted) for child in children)
    return counted[id(node)]


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """Parse YAML text that contains a mapping; empty text gives an empty dict.

    Args:
        text: YAML text; it is parsed by a safe loader, which executes no code.
        source: name of the file, for messages.

    Raises:
        ConfigError: if the text is not valid YAML (with the line), has a tag such as ``!!python/...``, is not a
            mapping, or is the config of a run in another format.
    """
    if len(text) > LARGEST:
        raise ConfigError(
            f"{source}: too large for a config file: {len(text)} characters, expected at most {LARGEST}.\n"
            "  fix: give the path of a config file"
        )
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark, words = None, []
        if isinstance(error, yaml.MarkedYAMLError):
            mark, words = error.problem_mark or error.context_mark, [error.context, error.problem]
        elif isinstance(error, yaml.reader.ReaderError):
            words = [error.reason]
        line = f", line {mark.line + 1}" if mark else ""
        problem = ", ".join(filter(None, words)) or str(error)
        raise ConfigError(
            f"{source}{line}: invalid YAML: {problem}.\n  fix: correct {line.removeprefix(', ') or 'the YAML'}"
        ) from error
    except _VALUE_ERRORS as error:
        raise ConfigError(
            f"{source}: invalid YAML: {type(error).__name__}: {error}.\n  fix: correct the value, or quote it"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{source}: expected a mapping of config keys, got {type(content).__name__}.\n  fix: write KEY: VALUE lines"
        )
    check_format(content.get(FORMAT_KEY, FORMAT), FORMAT, source, ConfigError)
    return content


def read_layers(path: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read a config file and its ``_BASE_`` files, in the order of merging.

    Args:
        path: a YAML file; ``~`` is expanded. If there is no such file, the recipe of this name.

    Returns:
        ``(path, mapping without _BASE_)`` for each file: base files first, ``path`` last.

    Raises:
        ConfigError: if a file is missing, unreadable, a ``.py`` file or not a YAML mapping, if ``_BASE_`` is not a path
            or a list of paths, or if a file includes itself through ``_BASE_``.
    """
    return _read(_existing_or_recipe(os.path.expanduser(os.fspath(path)), os.fspath(path)), ())


def _existing_or_recipe(path: str, name: str) -> str:
    """Return ``path`` if it exists; else the path of the recipe ``name``, if there is one; else ``path``."""
    recipe = None if os.path.exists(path) else find_recipe(name)
    return path if recipe is None else str(recipe)


def _read(path: str, chain: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Read ``path`` and its base files; ``chain`` lists the files that include ``path``, outermost first."""
    if any(os.path.realpath(path) == os.path.realpath(opened) for opened in chain):
        raise ConfigError(
            f"{chain[-1]}: cyclic {BASE_KEY}: {' -> '.join((*chain, path))}.\n  fix: remove {BASE_KEY} from one file"
        )
    mapping = dict(parse_yaml(_read_text(path, chain), path))
    bases = mapping.pop(BASE_KEY, [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) and base and "\0" not in base for base in bases):
        raise ConfigError(
            f"{path}: {BASE_KEY}: expected a path or a list of paths, got {reprlib.repr(bases)}.\n"
            f"  fix: set {BASE_KEY} to the path of a YAML file, or remove it"
        )
    layers = []
    for base in bases:
        base_path = os.path.normpath(os.path.join(os.path.dirname(path), os.path.expanduser(base)))
        # A bare file name, e.g. Base-bagtricks.yml, is not a recipe: old releases have base files of the same names.
        layers += _read(_existing_or_recipe(base_path, base) if "/" in base else base_path, (*chain, path))
    return [*layers, (path, mapping)]


def _read_text(path: str, chain: tuple[str, ...]) -> str:
    base_of = f" ({BASE_KEY} of {chain[-1]})" if chain else ""
    if Path(path).suffix.lower() in (".py", ".pyc"):
        raise ConfigError(
            f"{path}{base_of}: expected a YAML file, got a Python file (never executed).\n"
            "  fix: write the config as YAML"
        )
    try:
        check_not_device(Path(path))
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        hint = "\n  fix: correct the path" + (", or copy the base file to this folder" if chain else "")
        is_file_name = bool(chain) or Path(path).parent.is_dir()
        similar = "" if is_file_name else f".{did_you_mean(recipe_name(path), list_recipes())}"
        raise ConfigError(f"{path}{base_of}: config file not found{_describe_folder(path)}{similar}{hint}") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path}{base_of}: expected a config file, got a folder.\n  fix: give the path of a YAML file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}{base_of}: expected UTF-8 text, got {error.reason} at byte {error.start}.\n"
            "  fix: save the file as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}{base_of}: cannot read config file: {error}.\n  fix: give the path of a readable file"
        ) from error


def _describe_folder(path: str) -> str:
    """Return text about the folder of a missing file: its config files, or that the folder does not exist."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f"; the folder {str(folder)!r} does not exist"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yml", ".yaml"))
    return f"\n  found: {', '.join(names[:8])}" if names else ""
