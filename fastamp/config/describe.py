"""The documentation of every config key, as text for a terminal."""

import textwrap

from fastamp.config.config import CfgNode, get_cfg
from fastamp.config.key import Key
from fastamp.utils.errors import ConfigError, did_you_mean

_WIDTH = 100


def describe_config(prefix: str = "", cfg: CfgNode | None = None) -> str:
    """Return keys, defaults and meanings, grouped by section, at most 100 columns wide.

    Args:
        prefix: a section or a key, in any case; empty for all.
        cfg: the config to document, with a project's own keys; values that differ from the default are shown too.

    Raises:
        ConfigError: no key or section has that name; the message has the nearest one.
    """
    keys = list((get_cfg() if cfg is None else cfg).keys_below())
    wanted = prefix.strip().strip(".").lower()
    chosen = [(key, value) for key, value in keys if f"{key.path.lower()}.".startswith(f"{wanted}." if wanted else "")]
    if not chosen:
        names = {key.path for key, _ in keys} | {key.path.rpartition(".")[0] for key, _ in keys} - {""}
        raise ConfigError(f"there is no config key or section {prefix!r}.{did_you_mean(prefix, sorted(names))}")
    lines: list[str] = []
    section = None
    for key, value in chosen:
        if (here := key.path.rpartition(".")[0]) != section:
            section = here
            lines += ["", f"[{section or 'the run'}]"] if lines else [f"[{section or 'the run'}]"]
        lines += _describe(key, value)
    return "\n".join(lines)


def _describe(key: Key, value: object) -> list[str]:
    default = show_value(key.default)
    now = show_value(value)
    head = f"{key.path}: {default}" + (f"   (here: {now})" if now != default else "")
    meaning = key.meaning
    if key.choices:
        meaning += f" Choices: {', '.join(map(str, key.choices))}."
    if key.bounds:
        meaning += f" ({key.bounds[0].upper()}{key.bounds[1:]}.)"
    return [
        *textwrap.wrap(head, _WIDTH, subsequent_indent="      ", break_on_hyphens=False),
        *textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
    ]


def show_value(value: object) -> str:
    """Return a config's value as it would be written in YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(show_value(item) for item in value)}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return value if isinstance(value, str) and value else repr(value)
