"""Config tree compatible with yacs, with declared keys and checked values."""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import yaml
from yacs.config import CfgNode as YacsCfgNode

from fastamp.config.defaults import KEYS, SHORTHANDS
from fastamp.config.files import FOLDERS_KEY, FORMAT, parse_yaml, read_layers
from fastamp.config.key import Key, brief, convert, free_value, parse_bool, parse_literal, plain
from fastamp.config.projects import (
    PLUGINS_KEY,
    PROJECTS_KEY,
    import_project,
    load_projects,
    name_plugins,
    projects_first,
    projects_of,
)
from fastamp.config.releases import NO_COUNTERPART, OLD_NAMES, current_path, hint, read_recipe
from fastamp.config.suggest import fix_of_pairs, is_misspelled, unknown_key
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import FORMAT_KEY

logger = logging.getLogger(__name__)

COMMAND_LINE, ASSIGNMENT, _SAVED = "command line", "assignment", "saved config"
_NO_MEANING = "Declared by assignment, without a description."
Edit = Callable[[], Any]


class FrozenConfigError(ConfigError, AttributeError):
    """Raised when a frozen config is modified."""


class CfgNode(YacsCfgNode):  # type: ignore[misc]  # yacs has no types
    """The config, or one of its sections.

    Values from a file, a command line, another config or an attribute assignment are checked against the declared keys
    and converted to the types of these keys. A merge checks all values before it sets the first one, so a failed merge
    leaves the config unchanged.

    If a section has a key ``ENABLED``, assigning a bool to the section sets this key, and ``bool(section)`` returns its
    value. For any other section, ``bool(section)`` is True if the section is not empty.

    In a node created by ``CfgNode()``, assigning to a new attribute declares a key. If such a node is assigned to an
    attribute of a config, the node becomes a section in which assignments still declare keys. In the other sections,
    an assignment declares a key with a warning, unless the name is similar to that of an existing key, which is an
    error.

    Spellings that ``releases.current_path`` resolves can be set, too.
    """

    def __init__(
        self, init_dict: Mapping[str, Any] | None = None, key_list: Any = None, new_allowed: bool = False
    ) -> None:
        super().__init__(None, key_list, new_allowed)
        self.__dict__.update(_path="", _keys={}, _declares=True, _assigned=set())
        # Not `init_dict or {}`: a section that is not enabled has the truth value False.
        for name, value in ({} if init_dict is None else init_dict).items():
            self[name] = value

    # ---- reading

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in self:
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __bool__(self) -> bool:
        return bool(self["ENABLED"]) if "ENABLED" in self else len(self) > 0

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the config as YAML in IPython and notebooks."""
        printer.text(str(self))

    def keys_below(self) -> Iterator[tuple[Key, Any]]:
        """Yield ``(key, value)`` for each declared key below this node, in the order of declaration."""
        for name, value in self.items():
            if name in self._keys:
                yield self._keys[name], value
            elif isinstance(value, CfgNode):
                yield from value.keys_below()

    def is_set(self, path: str) -> bool:
        """Return True if a key was set, even to its default value, and not only copied from another config's defaults.

        Args:
            path: dotted path below this node.
        """
        *sections, name = path.split(".")
        node = self
        for section in sections:
            node = node[section]
        return name in node._assigned

    def dump(self, **options: Any) -> str:
        """Serialize the config as YAML. Merging the YAML into the default config reproduces the config.

        Args:
            options: keyword arguments of ``yaml.safe_dump``.
        """
        text: str = yaml.safe_dump(_to_builtin(self), **options)
        return text

    def saved_text(self) -> str:
        """Serialize the config of a run as YAML: ``dump``, the number of the format, and folders.

        Relative paths in the config hold in the folders: the current one, and then those of ``saved_in``.
        """
        folders = list(dict.fromkeys((os.getcwd(), *self.saved_in())))
        return f"{yaml.safe_dump({FORMAT_KEY: FORMAT, FOLDERS_KEY: folders})}{self.dump()}"

    def saved_in(self) -> tuple[str, ...]:
        """Return the folders in which the runs were started that saved this config, the last one first."""
        folders: tuple[str, ...] = self.__dict__.get("_folders", ())
        return folders

    # ---- changing

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise ConfigError(
                f"{name!r} is reserved by CfgNode and cannot be a config key.\n  fix: choose another name"
            )
        self._check_not_frozen(name)
        if isinstance(value, YacsCfgNode) and (name not in self or isinstance(self[name], CfgNode)):
            self._attach_or_merge(name, value)
        elif name not in self and (self._declares or self._is_new_key(name, value)):
            self._declare_value(name, value)
        else:
            _apply(self._edits(name, value, ASSIGNMENT))

    __setitem__ = __setattr__

    def merge_from_file(self, cfg_filename: Any, release: str = "") -> None:
        """Merge the base files listed in ``_BASE_`` of a YAML file, then the file itself.

        Files of FastReID v0.1.1 and v1.0.0 are detected by their keys. For such files, the defaults of the release are
        merged first, and all keys are translated to the current ones. Translated keys, and keys without a counterpart,
        are logged.

        Args:
            cfg_filename: path of the file.
            release: "v0.1.1" or "v1.0.0"; "" detects the release from the keys. Default "".

        Raises:
            ConfigError: if a file cannot be read, has an unknown key or an invalid value, or if files of an old release
                and of the current keys are mixed. The message names the file.
        """
        self._check_not_frozen()
        if not isinstance(cfg_filename, str | os.PathLike):
            raise ConfigError(
                f"merge_from_file: expected the path of a YAML file, got {brief(cfg_filename)} "
                f"({type(cfg_filename).__name__}).\n  fix: pass a path; for a dict, call cfg.merge_from_other_cfg(dict)"
            )
        if projects := projects_of(read_layers(cfg_filename)):
            self.merge_from_list([PROJECTS_KEY, projects])
        recipe = read_recipe(cfg_filename, known={key.path for key, _ in self.keys_below()}, release=release)
        _apply(edit for source, mapping in recipe.layers for edit in self._mapping_edits(mapping, source))
        self.__dict__["_notes"] = [*self.translation_notes(), *recipe.notes]
        for note in recipe.notes:
            logger.log(logging.WARNING if note.startswith(NO_COUNTERPART) else logging.INFO, "%s", note)

    def translation_notes(self) -> list[str]:
        """Return the lines that ``merge_from_file`` logged about translated keys and keys without a counterpart."""
        notes: list[str] = self.__dict__.get("_notes", [])
        return notes

    def merge_from_other_cfg(self, cfg_other: Mapping[str, Any]) -> None:
        """Merge another config or a nested dict.

        Raises:
            ConfigError: if a key is unknown or a value is invalid.
        """
        self._check_not_frozen()
        if not isinstance(cfg_other, Mapping):
            raise ConfigError(
                f"expected a config or a dict to merge, got {brief(cfg_other)}.\n"
                "  fix: pass a CfgNode or a dict; merge_from_file reads a file, merge_from_list reads KEY VALUE pairs"
            )
        _apply(self._mapping_edits(cfg_other, "another config"))

    def merge_saved(self, text: str) -> None:
        """Merge a saved config, the YAML text from ``dump``. No key counts as set, since the text contains all keys.

        Raises:
            ConfigError: if the text is not a YAML mapping, a key is unknown or a value is invalid.
        """
        self._check_not_frozen()
        edits = self._mapping_edits(parse_yaml(text, _SAVED), _SAVED)
        _apply(partial(edit, mark=False) if isinstance(edit, partial) else edit for edit in edits)

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge ``[KEY, VALUE, KEY, VALUE, ...]`` from a command line.

        Raises:
            ConfigError: if the length is odd, a key is unknown or a value is invalid.
        """
        self._check_not_frozen()
        if not isinstance(cfg_list, Sequence):
            raise ConfigError(
                f"overrides: expected a list [KEY, VALUE, ...], got {brief(cfg_list)} ({type(cfg_list).__name__}).\n"
                '  fix: pass a list such as ["SOLVER.BASE_LR", 1e-3]; for a dict, call cfg.merge_from_other_cfg(dict)'
            )
        if fix := fix_of_pairs(cfg_list):
            raise ConfigError(f"{COMMAND_LINE}: expected KEY VALUE pairs, got {brief(cfg_list)}.\n  fix: {fix}")
        # Of equal keys, the last one is effective.
        pairs = sorted(zip(cfg_list[::2], cfg_list[1::2], strict=True), key=lambda pair: pair[0] != PROJECTS_KEY)
        _apply(edit for name, value in pairs for edit in self._edits(name, value, COMMAND_LINE))

    def with_values(self, values: Mapping[str, Any]) -> "CfgNode":
        """Return a frozen copy with some values replaced. This config may be frozen and is not modified.

        Args:
            values: dotted key -> value, e.g. ``{"SOLVER.AMP.ENABLED": True}``.

        Raises:
            ConfigError: if a key is unknown or a value is invalid.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"with_values: expected a dict, got {brief(values)} ({type(values).__name__}).\n"
                '  fix: pass a dict such as {"SOLVER.BASE_LR": 1e-3}'
            )
        copied: CfgNode = self.clone()
        copied.defrost()
        _apply(edit for name, value in values.items() for edit in copied._edits(name, value, ASSIGNMENT))
        copied.freeze()
        return copied

    def changes(self, mapping: Mapping[Any, Any], source: str) -> list[tuple[str, Any]]:
        """Return ``(path, converted value)`` for each key that merging ``mapping`` would set.

        Args:
            mapping: contents of a config file.
            source: name of the file, for messages.

        Raises:
            ConfigError: if a key is unknown or a value is invalid.
        """
        edits = [edit for edit in self._mapping_edits(mapping, source) if isinstance(edit, partial)]
        return [(node._full(name), value) for node, name, value in (edit.args for edit in edits)]

    def define(
        self,
        path: str,
        default: Any,
        meaning: str,
        choices: Iterable[Any] = (),
        aliases: Mapping[str, str] | None = None,
        of: type | None = None,
    ) -> None:
        """Declare a config key of a project, which is then validated and documented like a built-in key.

        Args:
            path: dotted path below this node; missing sections are created.
            default: default value, which defines the type; ``{}`` makes a free-form section.
            meaning: description in one sentence, with the unit.
            choices: allowed strings or numbers. Default (): any value.
            aliases: alternative spelling -> choice.
            of: element type, if the default is an empty tuple or list.

        Raises:
            FrozenConfigError: if the config is frozen.
            ValueError: if the key or section exists already, or the description is empty.
        """
        self._define(Key(path, default, meaning, tuple(choices), dict(aliases or {}), of))

    def add_keys(self, keys: Iterable[Key]) -> None:
        """Declare the ``KEYS`` of a component, with paths relative to this node; for errors, see ``define``."""
        for key in keys:
            self._define(key)

    def _define(self, key: Key) -> None:
        """Declare a key with a dotted path below this node."""
        *sections, name = key.path.split(".")
        if not all([*sections, name]) or not key.meaning:
            raise ValueError(
                f"config key {key.path!r}: expected a dotted path and a non-empty description, got the description "
                f"{key.meaning!r}"
            )
        node = self
        node._check_not_frozen(key.path)
        for section in sections:
            if section not in node:
                node._attach(section, CfgNode())
                node[section].__dict__["_declares"] = False
            elif not isinstance(node[section], CfgNode):
                raise ValueError(
                    f"cannot declare the config key {key.path}: {node._full(section)} is a key, not a section.\n"
                    "  fix: choose another path for the new key"
                )
            node = node[section]
        if name in node:
            raise ValueError(f"config key {node._full(name)} is already declared.\n  fix: rename the new key")
        node._declare(replace(key, path=node._full(name)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "CfgNode":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__, _keys=dict(self._keys), _assigned=set(self._assigned))
        for name, value in self.items():
            dict.__setitem__(copied, name, copy.deepcopy(value, memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self.__dict__), dict(self))

    @classmethod
    def load_cfg(cls, cfg_file_obj_or_str: Any) -> "CfgNode":
        """Create a node from YAML text or an open YAML file.

        Raises:
            ConfigError: if the content is not a YAML mapping, or the file is a Python file (never executed).
        """
        if isinstance(cfg_file_obj_or_str, str):
            return cls(parse_yaml(cfg_file_obj_or_str, "config text"))
        name = str(cfg_file_obj_or_str.name)
        if name.endswith(".py"):
            raise ConfigError(
                f"{name}: expected a YAML file, got a Python file (never executed).\n  fix: write the config as YAML"
            )
        return cls(parse_yaml(cfg_file_obj_or_str.read(), name))

    # ---- setting values: edits are collected and checked first, then applied together

    def _mapping_edits(self, mapping: Mapping[Any, Any], source: str) -> Iterator[Edit]:
        for name, value in mapping.items() if self._path else projects_first(mapping):
            if not self._path and name in (FORMAT_KEY, FOLDERS_KEY):
                if name == FOLDERS_KEY:
                    yield self._set_folders(value, source)
                continue
            is_default = isinstance(mapping, CfgNode) and name in mapping._keys and name not in mapping._assigned
            for edit in self._edits(name, value, source):
                yield partial(edit, mark=False) if is_default and isinstance(edit, partial) else edit

    def _edits(self, name: Any, value: Any, source: str) -> Iterator[Edit]:
        """Yield the edits that set the key or section ``name``, a dotted path below this node, to ``value``."""
        if not isinstance(name, str):
            where = f" in {self._path}" if self._path else ""
            raise ConfigError(
                f"{source}: expected a string as config key, got {brief(name)} ({type(name).__name__}){where}.\n"
                "  fix: write the key as text, in quotes if YAML reads it as another type"
            )
        head, dot, rest = name.partition(".")
        self._check_not_frozen(head)
        if dot and isinstance(self.get(head), CfgNode):
            yield from self[head]._edits(rest, value, source)
        elif head in self and not dot:
            if isinstance(self[head], CfgNode):
                yield from self[head]._section_edits(value, source, self._keys.get(head))
            else:
                yield self._set(head, value, source)
        elif self.is_new_allowed() and head:
            yield self._set(name, value, source)  # not split at dots: keys of a free-form section may be globs
        elif (path := self._full(name)) != (current := current_path(path)):
            yield from self._edits(current.removeprefix(self._full("")), value, source)
        else:
            new = f"\n  for a new key: cfg.define({self._full(name)!r}, {brief(value)}, 'its meaning')"
            raise ConfigError(f"{source}: {self._unknown(name)}{new if source == ASSIGNMENT else ''}")

    def _section_edits(self, value: Any, source: str, free_form: Key | None) -> Iterator[Edit]:
        """Yield the edits that set this section to ``value``: a mapping, or a shorthand such as ``True``."""
        self._check_not_frozen()
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parse_literal(value) or parse_yaml(value, f"{source}: {self._path}")
        shorthand = SHORTHANDS.get(self._path)
        flag = parse_bool(value)
        if isinstance(value, Mapping):
            if free_form:
                yield self.clear
            yield from self._mapping_edits(_flat(value) if free_form and free_form.nested else value, source)
        elif flag is not None and "ENABLED" in self:
            yield self._set("ENABLED", flag, source)
        elif shorthand and value is not None:
            yield self._set(shorthand, value, source)
            yield self._set("ENABLED", True, source)
        else:
            accepts = "a section" + (" or true/false" if "ENABLED" in self else "")
            example = next((f" (e.g. with the key {self._full(name)})" for name in self), "")
            got = "null" if value is None else f"{brief(value)} ({type(value).__name__})"
            fix = hint(self._path) or f"fix: set keys of {self._path}, or remove it"
            raise ConfigError(f"{source}: {self._path}: expected {accepts}{example}, got {got}\n  {fix}")

    def _set(self, name: str, value: Any, source: str) -> Edit:
        """Return the edit that sets the key ``name`` of this node to the converted value."""
        if isinstance(value, Mapping):
            raise ConfigError(
                f"{source}: {self._full(name)} is a key: expected a value, got {brief(dict(value))}.\n"
                f"  fix: set {self._full(name)} to a value, not to a section"
            )
        try:
            key = self._keys.get(name)
            converted = convert(key, value) if key else free_value(self._full(name), value)
            if name == PROJECTS_KEY and not self._path:
                converted = load_projects(self, converted)
            elif name == PLUGINS_KEY and not self._path:
                converted = name_plugins(self, converted)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        return partial(_assign, self, name, converted)

    def _set_folders(self, value: Any, source: str) -> Edit:
        """Return the edit that sets the folders of ``saved_in``."""
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and "\0" not in item for item in value):
            raise ConfigError(
                f"{source}: {FOLDERS_KEY}: expected a list of folders, got {brief(value)}.\n  fix: remove {FOLDERS_KEY}"
            )
        return lambda: self.__dict__.update(_folders=tuple(value))

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _unknown(self, name: str) -> str:
        """Return the error message for an unknown key below this node."""
        head, _, rest = name.partition(".")
        if rest and head in self:
            return (
                f"unknown config key {self._full(name)!r}: {self._full(head)} is a key, not a section.\n"
                f"  fix: set {self._full(head)}"
            )
        return unknown_key(self._full(name), self._path, self, {*KEYS, *(key.path for key, _ in self.keys_below())})

    def _check_not_frozen(self, name: Any = "") -> None:
        if self.is_frozen():
            prefix = f"{self._full(name)}: " if name else ""
            raise FrozenConfigError(
                f"{prefix}the config is frozen.\n  fix: call cfg.defrost() first, or use cfg.with_values(...)"
            )

    # ---- declaring keys and sections

    def _is_new_key(self, name: str, value: Any) -> bool:
        """Return True, with a warning, for a name unlike those of existing keys; False for a typing error."""
        path = self._full(name)
        if self.is_new_allowed() or "." in name or path in OLD_NAMES or is_misspelled(name, self):
            return False
        warnings.warn(
            f"{path} is a new config key, declared by assignment: only your own code reads it.\n"
            f"  fix: to declare it without this warning, cfg.define({path!r}, {brief(value)}, 'its meaning')",
            stacklevel=3,
        )
        return True

    def _declare(self, key: Key) -> None:
        name = key.path.rpartition(".")[2]
        if not (key.default is None or isinstance(key.default, bool | int | float | str | tuple | list | Mapping)):
            raise ConfigError(
                f"{ASSIGNMENT}: {key.path}: expected null, a bool, number, string, list or dict, got "
                f"{type(key.default).__name__}.\n  fix: assign a value of one of these types"
            )
        if isinstance(key.default, Mapping):
            node = CfgNode(new_allowed=True)
            self._attach(name, node)
            node.__dict__["_declares"] = False
            node.merge_from_other_cfg(key.default)
        else:
            dict.__setitem__(self, name, convert(key, key.default))
        self._keys[name] = key

    def _declare_value(self, name: str, value: Any) -> None:
        """Declare an assigned attribute as a key, or as a section if its value is a dict."""
        value = plain(value)
        if not isinstance(name, str) or "." in name:
            raise ConfigError(
                f"{ASSIGNMENT}: expected a string without dots as config key, got {brief(name)}.\n"
                "  fix: assign one level at a time, e.g. a dict to a section"
            )
        if isinstance(value, dict):
            if any("." in str(name) for name in value):  # a mapping such as SOLVER.LR_FACTORS, not a section
                self._declare(Key(self._full(name), value, _NO_MEANING))
            else:
                self._attach(name, CfgNode(value))
        elif self.is_new_allowed():
            self._set(name, value, ASSIGNMENT)()
        else:
            self._declare(Key(self._full(name), value, _NO_MEANING))

    def _attach_or_merge(self, name: str, node: YacsCfgNode) -> None:
        """Attach ``node`` as a section, or merge it into the existing section."""
        if name not in self:
            # A node of another config is copied; one created by CfgNode() stays the same object.
            is_detached = isinstance(node, CfgNode) and node._declares and not node._path
            self._attach(name, node if is_detached else CfgNode(node, new_allowed=node.is_new_allowed()))
        elif name in self._keys or (isinstance(node, CfgNode) and not node._declares):
            _apply(self._edits(name, node, ASSIGNMENT))
        else:
            section = self[name]
            section.__dict__["_declares"] = True
            for child, value in list(node.items()):
                section[child] = value

    def _attach(self, name: str, node: "CfgNode") -> None:
        node._set_path(self._full(name))
        if node.is_new_allowed():
            self._keys[name] = Key(self._full(name), {}, _NO_MEANING)
        dict.__setitem__(self, name, node)

    def _set_path(self, path: str) -> None:
        self.__dict__["_path"] = path
        for name, key in self._keys.items():
            self._keys[name] = replace(key, path=self._full(name))
        for name, value in self.items():
            if isinstance(value, CfgNode):
                value._set_path(self._full(name))


def _apply(edits: Iterable[Edit]) -> None:
    """Collect all edits before applying them, so that an invalid edit leaves the config unchanged."""
    for edit in list(edits):
        edit()


def _assign(node: CfgNode, name: str, value: Any, *, mark: bool = True) -> None:
    dict.__setitem__(node, name, value)
    if mark:
        node._assigned.add(name)


def _flat(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Flatten one level: ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    flat: dict[Any, Any] = {}
    for name, value in mapping.items():
        inner = {f"{name}.{key}": leaf for key, leaf in value.items()} if isinstance(value, Mapping) else {name: value}
        flat.update(inner)
    return flat


def _restore(cls: type[CfgNode], state: dict[str, Any], items: dict[str, Any]) -> CfgNode:
    node = cls.__new__(cls)
    node.__dict__.update(state)
    dict.update(node, items)
    for project in state.get("_projects", ()):  # in another process, its components are not registered yet
        import_project(project)
    return node


def _to_builtin(value: Any) -> Any:
    if isinstance(value, CfgNode):
        return {name: _to_builtin(child) for name, child in value.items()}
    return [_to_builtin(element) for element in value] if isinstance(value, tuple | list) else value
