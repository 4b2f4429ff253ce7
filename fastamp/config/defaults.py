"""Table of all config keys, and aliases of keys and sections."""

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

# A spelling in FastReID's config files that is not a key of any of its releases.
FASTREID_SPELLINGS = {"SOLVER.AMP_ENABLED": "SOLVER.AMP.ENABLED"}
# Aliases of keys and sections: former path -> current path.
RENAMED = FASTREID_SPELLINGS | {
    "LOG_ACTIVATIONS": "LOG_ACTIVATION_STATS",
    "INPUT.GREY": "INPUT.GRAYSCALE",
    "INPUT.LOCAL_GREY": "INPUT.LOCAL_GRAYSCALE",
    "SOLVER.AMP.BN_GUARD": "SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP",
    "SOLVER.AMP.LOCATE": "SOLVER.AMP.TRACE_NONFINITE",
    "TEST.AP": "TEST.AP_METHOD",
    "TEST.AQE.SIDES": "TEST.AQE.TARGET",
    "TEST.FLOORS": "TEST.BASELINES",
    "TEST.REPEATS": "TEST.NUM_TRIALS",
    "TEST.RERANK.FORM": "TEST.RERANK.VARIANT",
}
# Sections that accept a single value: it is assigned to this key, and the section is enabled.
SHORTHANDS = {"SOLVER.AMP": "DTYPE"}


def current_path(path: str) -> str:
    """Return the current path of a key or section, given its current or former path."""
    names = path.split(".")
    for count in range(1, len(names) + 1):
        if current := RENAMED.get(".".join(names[:count])):
            return ".".join([current, *names[count:]])
    return path


def former_paths(path: str) -> list[str]:
    """Return the former paths of a key."""
    return [old + path.removeprefix(new) for old, new in RENAMED.items() if f"{path}.".startswith(f"{new}.")]
