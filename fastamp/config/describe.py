"""Documentation of config keys as text for a terminal."""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from fastamp.config.config import CfgNode
from fastamp.config.defaults import SHORTHANDS
from fastamp.config.key import Key, list_choices, show_value
from fastamp.config.read import get_cfg
from fastamp.config.releases import OLD_NAMES, read_recipe
from fastamp.utils.errors import ConfigError, did_you_mean

_WIDTH = 100


def describe_config(prefix: str = "", cfg: CfgNode | None = None) -> str:
    """Describe config keys by section, with default, description and constraints, in lines of at most 100 columns.

    Args:
        prefix: a section or a key, case-insensitive; "" for all keys. Default "".
        cfg: config whose keys are described, including keys that a project declares; values that differ from the
            default are shown. Default None: the default config.

    Raises:
        ConfigError: if no key or section has this name. The message suggests the nearest one.
    """
    keys = list((get_cfg() if cfg is None else cfg).keys_below())
    path = _current(prefix, [key for key, _ in keys])
    chosen = [(key, value) for key, value in keys if f"{key.path.lower()}.".startswith(f"{path}." if path else "")]
    if not chosen:
        names = {key.path for key, _ in keys} | {key.path.rpartition(".")[0] for key, _ in keys} - {""}
        raise ConfigError(
            f"unknown config key or section {prefix!r}.{did_you_mean(prefix, sorted(names))}\n"
            "  fix: list all keys with `fastamp config list`"
        )
    lines: list[str] = []
    section = None
    for key, value in chosen:
        if (parent := key.path.rpartition(".")[0]) != section:
            section = parent
            lines += ["", f"[{section or 'run'}]"] if lines else [f"[{section or 'run'}]"]
        lines += _describe(key, value)
    return "\n".join(lines)


def explain_key(
    name: str,
    cfg: CfgNode | None = None,
    config_file: str = "",
    *,
    components: Callable[[], Mapping[str, Sequence[str]]] | None = None,
) -> str:
    """Describe one key: default, description, type, constraints, aliases, and the values set by a config file.

    Args:
        name: key in upper or lower case; FastReID's names are accepted. For a section, the result is
            that of ``describe_config``. Other names are searched among the last parts of all keys: ``LR`` finds
            SOLVER.BASE_LR, and if several keys match equally well, e.g. ``ENABLED``, they are listed. If no
            name matches, the keys whose descriptions contain the words are listed: ``batch_size``.
        cfg: config with the keys, including keys that a project declares; a value that differs from the default is
            shown. Default None: the default config.
        config_file: config file to search, with its ``_BASE_`` files; "" for none. Default "".
        components: function that returns the component names that each key accepts; it is called only for keys that
            may name a component. Default None: component names are not listed.

    Raises:
        ConfigError: if no key or section has this name (the message suggests the nearest one), or the file is invalid.
    """
    cfg = get_cfg() if cfg is None else cfg
    values = list(cfg.keys_below())
    keys = [key for key, _ in values]
    path = _current(name, keys)
    key = next((key for key in keys if key.path.lower() == path), None)
    others: list[str] = []
    if key is None:
        if _is_prefix(path, keys):
            return describe_config(name, cfg)
        full_key = _find_by_last_part(path, keys)
        mentions = [] if full_key else _find_in_meanings(path, keys)
        if mentions:
            lines = [f"{mention.path}: {show_value(mention.default)}" for mention in mentions]
            return "\n".join([f"no key is named {name}; descriptions that contain these words:", *lines])
        if not full_key:
            return describe_config(name, cfg)  # raises
        if len(full_key) > 1 and _match_rank(path, full_key[0]) == _match_rank(path, full_key[1]):
            lines = [f"{key.path}: {show_value(key.default)}" for key in full_key]
            return "\n".join([f"{len(full_key)} keys match {name}; explain one of them:", *lines])
        key, *rest = full_key
        others = [other.path for other in rest]
    facts = key_facts(key, components)
    if others:
        facts.append(f"other keys with this name: {', '.join(others)}")
    if config_file:
        facts += _where_set(key, cfg, config_file)
    value = next(value for candidate, value in values if candidate is key)
    lines = [*_wrap(_default_and_value(key, value), "", "      "), *_wrap(key.meaning, "    ", "    ")]
    for fact in facts:
        lines += _wrap(fact, "    ", "      ")
    return "\n".join(lines)


def key_facts(key: Key, components: Callable[[], Mapping[str, Sequence[str]]] | None = None) -> list[str]:
    """Return the type, bounds, choices, aliases, FastReID's names and shorthands of a key, one text each.

    Args:
        key: the key.
        components: as in ``explain_key``.
    """
    section, _, last = key.path.rpartition(".")
    facts = [f"accepts {key.expected}" + (f", {key.bounds}" if key.bounds else "")]
    choices: Sequence[str | int] = key.choices
    if not choices and components is not None and "string" in key.expected:
        choices = components().get(key.path, ())
    if choices:
        facts.append(f"choices: {list_choices(choices)}")
    if key.aliases:
        facts.append(f"aliases: {', '.join(f'{alias} ({choice})' for alias, choice in key.aliases.items())}")
    facts += [f"name in FastReID: {old}" for old, new in OLD_NAMES.items() if new == key.path]
    if SHORTHANDS.get(section) == last:
        facts.append(f"shorthand: `{section} VALUE`, which also sets {section}.ENABLED True")
    if last == "ENABLED":
        facts.append(f"shorthand: `{section} True` and `{section} False`")
    return facts


def _find_by_last_part(name: str, keys: Sequence[Key]) -> list[Key]:
    """Find the keys whose last part contains ``name`` as a word, or whose path ends in ``.name``; best match first."""

    def matches(path: str) -> bool:
        return path.endswith(f".{name}") or f"_{name}_" in f"_{path.rpartition('.')[2]}_"

    return sorted((key for key in keys if matches(key.path.lower())), key=lambda key: _match_rank(name, key))


def _find_in_meanings(name: str, keys: Sequence[Key]) -> list[Key]:
    """Find the keys whose description contains the words of ``name``, in any order, at the start of a word."""
    words = re.findall(r"[a-z0-9]+", name)
    texts = {key.path: re.sub(r"\W+", " ", f" {key.meaning.lower()}") for key in keys}
    return [key for key in keys if words and all(f" {word}" in texts[key.path] for word in words)]


def _match_rank(name: str, key: Key) -> tuple[bool, int, int]:
    """Rank matches: first keys that end in ``name``, then those in fewer sections, then those with fewer words."""
    path = key.path.lower()
    return not path.endswith(name), path.count("."), path.rpartition(".")[2].count("_")


def _current(name: str, keys: Sequence[Key]) -> str:
    """Resolve any name of a key or section, in any case, to its current path in lower case."""
    path = name.strip().strip(".").lower()
    if _is_prefix(path, keys):
        return path
    return next((new.lower() for old, new in OLD_NAMES.items() if new and old.lower() == path), path)


def _is_prefix(path: str, keys: Sequence[Key]) -> bool:
    """Return True if ``path``, in lower case, is a section or a key."""
    return any(f"{key.path.lower()}.".startswith(f"{path}.") for key in keys)


def _where_set(key: Key, cfg: CfgNode, config_file: str) -> list[str]:
    """Return one line ``file: value`` for each file that sets the key, in merge order; the last one applies."""
    lines = []
    cfg = cfg.clone()
    cfg.defrost()  # ``changes`` does not accept a frozen config
    for source, mapping in read_recipe(config_file, known={key.path for key, _ in cfg.keys_below()}).layers:
        for path, value in cfg.changes(mapping, source):
            if path == key.path:
                lines.append(f"{source}: {show_value(value)}")
            elif path.startswith(f"{key.path}."):  # of a free-form section
                lines.append(f"{source}: {path.removeprefix(f'{key.path}.')} {show_value(value)}")
    return lines or [f"{config_file}: not set"]


def _default_and_value(key: Key, value: object) -> str:
    """Return one line with the default of a key and, if it differs, its value."""
    default, now = show_value(key.default), show_value(value)
    return f"{key.path}: {default}" + (f"   (set to: {now})" if now != default else "")


def _describe(key: Key, value: object) -> list[str]:
    meaning = key.meaning
    if key.choices:
        meaning += f" Choices: {list_choices(key.choices)}."
    if key.bounds:
        meaning += f" ({key.bounds[0].upper()}{key.bounds[1:]}.)"
    return [*_wrap(_default_and_value(key, value), "", "      "), *_wrap(meaning, "    ", "    ")]


def _wrap(text: str, first: str, indent: str) -> list[str]:
    """Wrap text with the given indents, without breaking paths."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
