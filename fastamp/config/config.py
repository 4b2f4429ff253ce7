"""The config tree: FastReID's yacs nodes, with forgiving conversions, strict keys and messages that help."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import yaml
from yacs.config import CfgNode as YacsCfgNode

from fastamp.config.defaults import KEYS, SHORTHANDS, present_path
from fastamp.config.files import parse_yaml
from fastamp.config.key import Key, brief, convert, free_value, parse_bool, parse_literal, plain
from fastamp.config.releases import hint, read_recipe
from fastamp.config.suggest import unknown_key
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

COMMAND_LINE, ASSIGNMENT = "command line", "assignment"
_NO_MEANING = "Added by code, which gives no meaning."
Edit = Callable[[], Any]


class FrozenConfigError(ConfigError, AttributeError):
    """A frozen config was asked to change."""


class CfgNode(YacsCfgNode):
    """A section of the config, or all of it.

    Every change (file, command line, other config, attribute) is looked up among the declared keys and converted to
    their type before anything is written, so one that fails leaves the config as it was. A section with an
    ``ENABLED`` key takes a bool in its place, and is true exactly when it is enabled; other sections are true when
    they hold anything.

    A node made by hand, ``CfgNode()``, belongs to code: assigning to a new attribute declares a key. Assigned to an
    attribute of a config, it becomes a section of it, and goes on declaring keys.
    """

    def __init__(
        self, init_dict: Mapping[str, Any] | None = None, key_list: Any = None, new_allowed: bool = False
    ) -> None:
        super().__init__(None, key_list, new_allowed)
        self.__dict__.update(_path="", _keys={}, _declares=True)
        # Not `init_dict or {}`: a section that is not enabled is false.
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

    def __missing__(self, name: str) -> Any:
        """Look up a key or section by a former name, so that code written for it still reads its value."""
        present = self._present(name)
        if present == name:
            raise KeyError(name)
        node: Any = self
        for part in present.split("."):
            node = node[part]
        return node

    def __bool__(self) -> bool:
        return bool(self["ENABLED"]) if "ENABLED" in self else len(self) > 0

    def keys_below(self) -> Iterator[tuple[Key, Any]]:
        """Yield each declared key under this node with its present value, in the order of declaration."""
        for name, value in self.items():
            if name in self._keys:
                yield self._keys[name], value
            elif isinstance(value, CfgNode):
                yield from value.keys_below()

    def dump(self, **options: Any) -> str:
        """Return YAML that gives this config again when it is merged into the defaults.

        Args:
            options: of ``yaml.safe_dump``.
        """
        return yaml.safe_dump(_to_plain(self), **options)

    # ---- changing

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            raise ConfigError(f"{name!r} is a part of the config's own machinery, not a key")
        self._refuse_if_frozen(name)
        present = self._present(name)
        if present != name and "." not in present:
            name = present
        if isinstance(value, YacsCfgNode) and (name not in self or self._is_section(name)):
            self._adopt(name, value)
        elif self._declares and name not in self and present == name:
            self._declare_value(name, value)
        else:
            _apply(self._edits(name, value, ASSIGNMENT))

    __setitem__ = __setattr__

    def merge_from_file(self, cfg_filename: Any, release: str = "") -> None:
        """Merge a YAML file, after the files that its ``_BASE_`` names.

        Files of FastReID v0.1.1 and v1.0.0 are recognized: their release's defaults are merged first, and all is
        translated to the present keys. The log says what was translated, and what has no counterpart.

        Args:
            cfg_filename: path.
            release: "v0.1.1" or "v1.0.0" where the release is known; "" detects it from the keys. Default "".

        Raises:
            ConfigError: a file cannot be read, has an unknown key or a wrong value, or is of an old release and merged
                with one of the present keys; the message names that file.
        """
        self._refuse_if_frozen()
        recipe = read_recipe(cfg_filename, known={key.path for key, _ in self.keys_below()}, release=release)
        _apply(edit for source, mapping in recipe.layers for edit in self._mapping_edits(mapping, source))
        self.__dict__["_notes"] = [*self.translation_notes(), *recipe.notes()]
        for line in recipe.lines:
            logger.info("%s", line)
        for line in recipe.missing:
            logger.warning("no counterpart: %s", line)

    def translation_notes(self) -> list[str]:
        """Return one line for each old key that ``merge_from_file`` translated, or found no counterpart for."""
        return self.__dict__.get("_notes", [])

    def merge_from_other_cfg(self, cfg_other: Mapping[str, Any]) -> None:
        """Merge another config or a nested dict.

        Raises:
            ConfigError: it has an unknown key or a wrong value.
        """
        self._refuse_if_frozen()
        if not isinstance(cfg_other, Mapping):
            raise ConfigError(f"expected a config or a dict to merge, got {brief(cfg_other)}")
        _apply(self._mapping_edits(cfg_other, "another config"))

    def merge_from_list(self, cfg_list: Sequence[Any]) -> None:
        """Merge ``[KEY, VALUE, KEY, VALUE, ...]``, as given on a command line.

        Raises:
            ConfigError: the count is odd, a key is unknown or a value is wrong.
        """
        self._refuse_if_frozen()
        flag = next((word for word in cfg_list[::2] if str(word).startswith("--")), None)
        if flag is not None:
            raise ConfigError(
                f"{COMMAND_LINE}: {flag} stands where a config key should; put flags before KEY VALUE pairs"
            )
        if isinstance(cfg_list, str) or len(cfg_list) % 2:
            hint = next((f"; write {k.replace('=', ' ', 1)}" for k in cfg_list if "=" in str(k)), "")
            raise ConfigError(f"{COMMAND_LINE}: expected pairs of KEY VALUE, got {brief(cfg_list)}{hint}")
        pairs = zip(cfg_list[::2], cfg_list[1::2], strict=True)
        _apply(edit for name, value in pairs for edit in self._edits(name, value, COMMAND_LINE))

    def with_values(self, values: Mapping[str, Any]) -> "CfgNode":
        """Return a frozen copy with other values; this config, which may be frozen, stays as it is.

        Args:
            values: dotted key -> value, e.g. ``{"SOLVER.AMP.ENABLED": True}``.

        Raises:
            ConfigError: a key is unknown or a value is wrong.
        """
        twin = self.clone()
        twin.defrost()
        _apply(edit for name, value in values.items() for edit in twin._edits(name, value, ASSIGNMENT))
        twin.freeze()
        return twin

    def changes(self, mapping: Mapping[Any, Any], source: str) -> list[tuple[str, Any]]:
        """Return path and converted value of each key that merging ``mapping`` would set, without doing it.

        Args:
            mapping: as a config file holds it.
            source: where it comes from, for messages.

        Raises:
            ConfigError: it has an unknown key or a wrong value.
        """
        edits = [edit for edit in self._mapping_edits(mapping, source) if isinstance(edit, partial)]
        return [(node._full(name), value) for node, name, value in (edit.args for edit in edits)]

    def define(
        self,
        path: str,
        default: Any,
        meaning: str,
        choices: Iterable[str] | Iterable[int] = (),
        aliases: Mapping[str, str] | None = None,
        of: type | None = None,
    ) -> None:
        """Declare a key of a project's own, which every check and the documentation then know.

        Args:
            path: dotted, below this node; sections on the way are made.
            default: its type becomes the key's; ``{}`` makes a section that takes any key.
            meaning: one sentence, with the unit.
            choices: the only texts or numbers allowed.
            aliases: further spellings, each with the choice that it stands for.
            of: the type of the elements where the default is an empty tuple or list.

        Raises:
            FrozenConfigError: the config is frozen.
            ValueError: there is such a key or section already, or the meaning is empty.
        """
        self._define(Key(path, default, meaning, tuple(choices), dict(aliases or {}), of))

    def add_keys(self, keys: Iterable[Key]) -> None:
        """Declare the ``KEYS`` of a component, see ``define``, which says what is raised; paths are below this node."""
        for key in keys:
            self._define(key)

    def _define(self, key: Key) -> None:
        """Declare ``key``, whose path is dotted and below this node."""
        *sections, name = key.path.split(".")
        if not all([*sections, name]) or not key.meaning:
            raise ValueError(f"{key.path!r}: a config key needs a dotted path and a meaning")
        node = self
        node._refuse_if_frozen(key.path)
        for section in sections:
            if section not in node:
                node._attach(section, CfgNode())
                node[section].__dict__["_declares"] = False
            elif not node._is_section(section):
                raise ValueError(f"{node._full(section)} is a value already, so {key.path} cannot stand below it")
            node = node[section]
        if name in node:
            raise ValueError(f"the config key {node._full(name)} exists already")
        node._declare(replace(key, path=node._full(name)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "CfgNode":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__, _keys=dict(self._keys))
        for name, value in self.items():
            dict.__setitem__(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self.__dict__), dict(self))

    @classmethod
    def load_cfg(cls, cfg_file_obj_or_str: Any) -> "CfgNode":
        """Return a node of its own from YAML text or an open YAML file.

        Raises:
            ConfigError: it is no YAML mapping; Python files are not run.
        """
        if isinstance(cfg_file_obj_or_str, str):
            return cls(parse_yaml(cfg_file_obj_or_str, "config text"))
        name = str(cfg_file_obj_or_str.name)
        if name.endswith(".py"):
            raise ConfigError(f"{name}: a config is a YAML file; Python files are not run")
        return cls(parse_yaml(cfg_file_obj_or_str.read(), name))

    # ---- how a change is made: names and values become edits, and only when all are known to be right are they applied

    def _mapping_edits(self, mapping: Mapping[Any, Any], source: str) -> Iterator[Edit]:
        for name, value in mapping.items():
            yield from self._edits(name, value, source)

    def _edits(self, name: Any, value: Any, source: str) -> Iterator[Edit]:
        """Yield what must be done so that ``name``, dotted and below this node, gets ``value``."""
        if not isinstance(name, str):
            where = f" in {self._path}" if self._path else ""
            raise ConfigError(f"{source}: a config key is text, got {brief(name)} ({type(name).__name__}){where}")
        name = self._present(name)
        head, dot, rest = name.partition(".")
        self._refuse_if_frozen(head)
        if dot and isinstance(self.get(head), CfgNode):
            yield from self[head]._edits(rest, value, source)
        elif head in self and not dot:
            if isinstance(self[head], CfgNode):
                yield from self[head]._section_edits(value, source, self._keys.get(head))
            else:
                yield self._set(head, value, source)
        elif self.is_new_allowed() and head:
            yield self._set(name, value, source)  # with its dots: a free-form section's keys may be globs
        else:
            raise ConfigError(f"{source}: {self._unknown(name)}")

    def _section_edits(self, value: Any, source: str, free_form: Key | None) -> Iterator[Edit]:
        """Yield what must be done so that this section gets ``value``: a mapping, or a short spelling."""
        self._refuse_if_frozen()
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
            accepts = "a section" + (", or true or false" if "ENABLED" in self else "")
            example = next((f"; a key of it is {self._full(name)}" for name in self), "")
            got = "nothing (null)" if value is None else f"{brief(value)} ({type(value).__name__})"
            old = f"\n  {text}" if (text := hint(self._path)) else ""
            raise ConfigError(f"{source}: {self._path}: expected {accepts}, got {got}{example}{old}")

    def _set(self, name: str, value: Any, source: str) -> Edit:
        """Return the edit that gives the key ``name`` of this node ``value``, converted."""
        self._refuse_if_frozen(name)
        if isinstance(value, Mapping):
            raise ConfigError(f"{source}: {self._full(name)} is a value, not a section; got {brief(dict(value))}")
        try:
            key = self._keys.get(name)
            converted = convert(key, value) if key else free_value(self._full(name), value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        return partial(dict.__setitem__, self, name, converted)

    def _full(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _present(self, name: Any) -> Any:
        """Return the present name, below this node, of a key or section; ``name`` may be dotted or a former one."""
        if not isinstance(name, str) or name.partition(".")[0] in self:
            return name
        path = self._full(name)
        present = present_path(path)
        return name if present == path else present.removeprefix(f"{self._path}.")

    def _unknown(self, name: str) -> str:
        """Return the message for the key ``name`` that is not below this node."""
        head, _, rest = name.partition(".")
        if rest and head in self:
            return f"{self._full(head)} is a value, not a section, so there is no {self._full(name)}"
        if old := hint(self._full(name)):
            return old
        return unknown_key(self._full(name), self._path, self, {*KEYS, *(key.path for key, _ in self.keys_below())})

    def _is_section(self, name: str) -> bool:
        return isinstance(self.get(name), CfgNode)

    def _refuse_if_frozen(self, name: Any = "") -> None:
        if self.is_frozen():
            what = f"{self._full(name)}: " if name else ""
            raise FrozenConfigError(f"{what}this config is frozen; defrost() or clone it to change it")

    # ---- how a key or a section comes into being

    def _declare(self, key: Key) -> None:
        name = key.path.rpartition(".")[2]
        if not (key.default is None or isinstance(key.default, bool | int | float | str | tuple | list | Mapping)):
            raise ConfigError(f"{ASSIGNMENT}: {key.path}: a config holds no {type(key.default).__name__}")
        if key.is_free_form:
            node = CfgNode(new_allowed=True)
            self._attach(name, node)
            node.__dict__["_declares"] = False
            node.merge_from_other_cfg(key.default)
        else:
            dict.__setitem__(self, name, convert(key, key.default))
        self._keys[name] = key

    def _declare_value(self, name: str, value: Any) -> None:
        """Declare a key, or for a dict a section, by assignment to a node made by hand."""
        value = plain(value)
        if not isinstance(name, str) or "." in name:
            raise ConfigError(f"{ASSIGNMENT}: {brief(name)} cannot be the name of a config key")
        if isinstance(value, dict):
            self._attach(name, CfgNode(value))
        elif self.is_new_allowed():
            self._set(name, value, ASSIGNMENT)()
        else:
            self._declare(Key(self._full(name), value, _NO_MEANING))

    def _adopt(self, name: str, node: YacsCfgNode) -> None:
        """Make ``node`` a section of this one, or add what it holds to the section that is there."""
        if name not in self:
            # A node of another config is copied; one made by hand stays the object that its maker holds.
            is_hand_made = isinstance(node, CfgNode) and node._declares and not node._path
            self._attach(name, node if is_hand_made else CfgNode(node, new_allowed=node.is_new_allowed()))
        elif name in self._keys or not getattr(node, "_declares", True):
            _apply(self._edits(name, node, ASSIGNMENT))
        else:
            section = self[name]
            section.__dict__["_declares"] = True
            for child, value in list(node.items()):
                section[child] = value

    def _attach(self, name: str, node: "CfgNode") -> None:
        node._move_to(self._full(name))
        if node.is_new_allowed():
            self._keys[name] = Key(self._full(name), {}, _NO_MEANING)
        dict.__setitem__(self, name, node)

    def _move_to(self, path: str) -> None:
        self.__dict__["_path"] = path
        for name, key in self._keys.items():
            self._keys[name] = replace(key, path=self._full(name))
        for name, value in self.items():
            if isinstance(value, CfgNode):
                value._move_to(self._full(name))


@cache
def _defaults() -> CfgNode:
    cfg = CfgNode()
    cfg.__dict__["_declares"] = False
    cfg.add_keys(KEYS.values())
    return cfg


def get_cfg() -> CfgNode:
    """Return a fresh config with every default."""
    return _defaults().clone()


def _apply(edits: Iterable[Edit]) -> None:
    """Collect all edits, so that a wrong one stops them all, then make them."""
    for edit in list(edits):
        edit()


def _flat(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``{"a.b": 1}`` for ``{"a": {"b": 1}}``."""
    flat: dict[Any, Any] = {}
    for name, value in mapping.items():
        inner = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        flat.update(inner)
    return flat


def _restore(cls: type[CfgNode], state: dict[str, Any], items: dict[str, Any]) -> CfgNode:
    node = cls.__new__(cls)
    node.__dict__.update(state)
    dict.update(node, items)
    return node


def _to_plain(value: Any) -> Any:
    if isinstance(value, CfgNode):
        return {name: _to_plain(child) for name, child in value.items()}
    return [_to_plain(element) for element in value] if isinstance(value, tuple | list) else value
