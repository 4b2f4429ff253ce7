"""Comparison of a config with a saved config or with the defaults."""

from typing import Any

from fastamp.config.config import CfgNode
from fastamp.config.defaults import former_paths
from fastamp.config.files import parse_yaml
from fastamp.config.key import show_value


def describe_changes(cfg: CfgNode, before: str, source: str) -> list[str]:
    """Describe each key that differs from a saved config, as ``KEY: before -> now``.

    Args:
        cfg: the current config.
        before: saved output of ``cfg.dump()``; missing keys had their default values.
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
    """Return the values that differ from the defaults, as nested dicts. Merged into the defaults, they give ``cfg``."""
    values, changed = parse_yaml(cfg.dump(), "this config"), {}
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
    """Look up a key in nested dicts by its current and former paths; return ``default`` if it is not set."""
    for each in (path, *former_paths(path)):
        value = mapping
        for name in each.split("."):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            return value
    return default
