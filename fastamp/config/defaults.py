"""Table of all config keys, and of sections that accept a single value."""

from fastamp.config.component_keys import component_keys
from fastamp.config.key import Key
from fastamp.config.sections import SECTIONS
from fastamp.utils.errors import ConfigError


def _all_keys() -> dict[str, Key]:
    """Collect all keys in the order of ``SECTIONS``; component keys without a marker there come last."""
    from_components = component_keys()
    keys: dict[str, Key] = {}
    for entry in SECTIONS:
        if isinstance(entry, Key):
            assert entry.path not in keys | from_components, f"{entry.path} is declared twice"
            keys[entry.path] = entry
        else:
            marked = {path: key for path, key in from_components.items() if f"{path}.".startswith(f"{entry}.")}
            if not marked:
                raise ConfigError(
                    f"no component declares the config keys {entry}.*: the installed package has no .py files.\n"
                    "  fix: install fastamp with its .py files, as pip does"
                )
            keys |= marked
    return keys | from_components


KEYS: dict[str, Key] = _all_keys()

# Sections that accept a single value: it is assigned to this key, and the section is enabled.
SHORTHANDS = {"SOLVER.AMP": "DTYPE"}
