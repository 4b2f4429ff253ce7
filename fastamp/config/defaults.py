"""Every config key with its default and its meaning: the one table behind the config and its documentation."""

from fastamp.config.component_keys import component_keys
from fastamp.config.key import Key
from fastamp.config.sections import SECTIONS
from fastamp.utils.errors import ConfigError


def _all_keys() -> dict[str, Key]:
    """Return the keys of ``SECTIONS`` in their order, those of components where they are marked, the others last."""
    of_components = component_keys()
    keys: dict[str, Key] = {}
    for entry in SECTIONS:
        if isinstance(entry, Key):
            assert entry.path not in keys | of_components, f"{entry.path} is declared twice"
            keys[entry.path] = entry
        else:
            marked = {path: key for path, key in of_components.items() if f"{path}.".startswith(f"{entry}.")}
            if not marked:
                raise ConfigError(
                    f"no component declares the config keys {entry}.*: the installed package has no .py files.\n"
                    "  fix: install fastamp with its .py files, as pip does"
                )
            keys |= marked
    return keys | of_components


KEYS: dict[str, Key] = _all_keys()

# FastReID's old spellings, each with the key below the same section that is meant.
RENAMED = {"SOLVER.AMP_ENABLED": "SOLVER.AMP.ENABLED"}
# Sections that take a bare value in their place: it goes to this key, and the section is enabled.
SHORTHANDS = {"SOLVER.AMP": "DTYPE"}
