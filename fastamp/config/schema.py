"""JSON Schema of config files, for completion and checks in editors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastamp.config.defaults import KEYS, SHORTHANDS
from fastamp.config.files import BASE_KEY, FOLDERS_KEY, FORMAT
from fastamp.config.key import Key
from fastamp.config.releases import OLD_NAMES
from fastamp.utils.files import FORMAT_KEY

SCHEMA_FILE = "fastamp.schema.json"
HEADER = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
"""First line of a YAML file, by which editors with the YAML language server find the schema next to the file."""

_TYPES = {bool: ["boolean", "string"], int: ["integer"], float: ["number"], str: ["string", "number"]}
# An editor reads on, off, yes and no as strings (YAML 1.2).
_BOOL = "on|off|yes|no"
_SEQUENCE = r"[\[(].*[\])]|[-+.,eE\d\s]+"


def build_schema(
    keys: Iterable[Key] = KEYS.values(), names: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Build the JSON Schema (draft 7) of a config file.

    Keys of old FastReID releases are marked as deprecated. The schema is stricter
    than ``merge_from_file`` in three cases: dotted keys (``SOLVER.AMP.ENABLED: True``), quoted numbers, and choices in
    mixed case are errors in an editor only.

    Args:
        keys: declared keys, including those of plugins. Default: the keys of fastamp.
        names: key path -> names that the key accepts, offered as completions. Other names stay valid. Default None: no
            names.

    Returns:
        The schema as nested dicts and lists.
    """
    root = _section()
    for key in keys:
        _parent(root, key.path)[key.path.rpartition(".")[2]] = _key(key, (names or {}).get(key.path, ()))
    _add_shorthands(root, "")
    for old, current in OLD_NAMES.items():
        node, name = _parent(root, old), old.rpartition(".")[2]
        if name in node:  # now a section
            node[name]["type"].append("number")
        else:
            now = f"now {current}" if current else "without a counterpart"
            message = f"Key of old FastReID releases, {now}. `fastamp config convert` translates the file."
            node[name] = {"description": message, "deprecated": True, "deprecationMessage": message}
    base = {
        "description": "Config files that are merged first: a path, the name of a recipe, or a list of them.",
        "type": ["string", "array"],
        "items": {"type": "string"},
    }
    saved = {
        FORMAT_KEY: {"description": "Number of the format of the config of a run.", "const": FORMAT},
        FOLDERS_KEY: {
            "description": "Folders in which the runs of a saved config were started.",
            "type": "array",
            "items": {"type": "string"},
        },
    }
    root["properties"] = {BASE_KEY: base} | saved | root["properties"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Config of fastamp"} | root


def _section() -> dict[str, Any]:
    return {"type": ["object"], "properties": {}, "additionalProperties": False}


def _add_shorthands(section: dict[str, Any], path: str) -> None:
    """Accept a bool, or the choices of the key in ``SHORTHANDS``, in place of each section that has a key ENABLED."""
    properties = section["properties"]
    if "ENABLED" in properties:
        choices = properties[SHORTHANDS[path]]["enum"] if path in SHORTHANDS else []
        section["type"] += ["boolean", "string"]
        section["pattern"] = _pattern(_BOOL, *(choice for choice in choices if isinstance(choice, str)))
    for name, child in properties.items():
        if "properties" in child:
            _add_shorthands(child, f"{path}.{name}" if path else name)


def _parent(root: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the properties of the section of ``path``; missing sections are created."""
    node = root
    for name in path.split(".")[:-1]:
        node = node["properties"].setdefault(name, _section())
    properties: dict[str, Any] = node["properties"]
    return properties


def _pattern(*alternatives: str) -> str:
    return f"^({'|'.join(alternatives)})$"


def _key(key: Key, names: Sequence[str]) -> dict[str, Any]:
    """Build the schema of one key: type, choices, bounds, description and default."""
    description = f"{key.meaning} Expected: {key.bounds}." if key.bounds else key.meaning
    about = {"description": description} | ({"examples": list(names)} if names else {})
    anything = ["string", "number", "boolean", "array", "null"]
    if key.is_free_form:
        values = {"type": [*anything, "object"] if key.nested else anything}
        return about | {"type": "object", "additionalProperties": values, "default": dict(key.default)}
    if key.default is None:
        scalar = [kind for kind in anything if kind != "array"]
        return about | {"type": anything, "items": {"type": scalar}, "default": None}
    if isinstance(key.default, tuple | list):
        return about | _sequence(key, about.pop("examples", [])) | {"default": list(key.default)}
    if key.choices:
        return about | {"enum": _choices(key), "default": key.default}
    return about | _scalar(type(key.default), key) | {"default": key.default}


def _scalar(kind: type | None, key: Key) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": list(_TYPES[kind])} if kind else {}
    if kind is bool:
        schema["pattern"] = _pattern(_BOOL)
    bounds = {"minimum": key.low, "exclusiveMinimum": key.above, "maximum": key.high}
    return schema | {name: bound for name, bound in bounds.items() if bound is not None}


def _sequence(key: Key, names: Sequence[str]) -> dict[str, Any]:
    """Build the schema of a list; a single element, and a list in a string, e.g. ``"(1, 2)"``, are valid too."""
    items = _scalar(key.element_type, key)
    schema = dict(items) | {"items": items | ({"examples": list(names)} if names else {})}
    if key.element_type is not None:
        schema["type"] = ["array", *{**dict.fromkeys(items["type"]), "string": None}]
    if key.element_type in (bool, int, float):
        schema["pattern"] = _pattern(_SEQUENCE)
    if key.forms:
        return schema | {"minItems": 1, "maxItems": 2}
    if key.length:
        return schema | {"type": ["array", "string"], "minItems": key.length, "maxItems": key.length}
    return schema


def _choices(key: Key) -> list[Any]:
    """List the choices and their aliases, also in lower and upper case, and the bools that YAML reads as on or off."""
    words = [*key.choices, *key.aliases]
    texts = [word for word in words if isinstance(word, str)]
    cases = [case for word in texts for case in (word.lower(), word.upper())]
    flags = [flag for flag, word in ((True, "on"), (False, "off")) if word in cases]
    return list(dict.fromkeys([*words, *cases])) + flags
