"""Comparison of a config with a saved config or with the defaults."""

from typing import Any

from fastamp.config.config import CfgNode
from fastamp.config.files import parse_yaml
from fastamp.config.key import show_value


def describe_changes(cfg: CfgNode, before: str, source: str) -> list[str]:
    """Return one line ``KEY: before -> now`` for each key whose value differs from a saved config.

    Args:
        cfg: the current config.
        before: YAML of the saved config, as returned by ``cfg.dump()``. A missing key counts as its default value.
        source: name of the saved config, for messages.

    Raises:
        ConfigError: if ``before`` is not a YAML mapping.
    """
    then, now = parse_yaml(before, source), parse_yaml(cfg.dump(), "this config")
    lines = []
    for key, _ in cfg.keys_below():
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        old, new = _at(then, key.path, default), _at(now, key.path, default)
        if old != new:
            lines.append(f"{key.path}: {show_value(old)} -> {show_value(new)}")
    return lines


def changed_values(cfg: CfgNode) -> dict[str, Any]:
    """Return the values of ``cfg`` that differ from the defaults, as nested dicts.

    Merging the result into the default config reproduces ``cfg``.
    """
    values = parse_yaml(cfg.dump(), "this config")
    changed: dict[str, Any] = {}
    for key, _ in cfg.keys_below():
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        value = _at(values, key.path, default)
        if value != default:
            *sections, name = key.path.split(".")
            node = changed
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
    return changed


def _at(mapping: Any, path: str, default: Any) -> Any:
    """Return the value at ``path`` in nested dicts; ``default`` if there is none."""
    value = mapping
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value
