"""A config key, and the conversion of what people write to the type that the key has."""

import ast
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastamp.utils.errors import ConfigError, did_you_mean

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_NONE = ("none", "null")
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", None: "a value"}
_EXPECTED_MANY = {bool: "true/false", int: "whole numbers", float: "numbers", str: "names", None: "values"}


@dataclass(frozen=True)
class Key:
    """One config key: where it stands, what it is when nobody sets it, and what it means.

    Attributes:
        path: dotted, e.g. ``"SOLVER.BASE_LR"``.
        default: a bool, int, float, str, or a tuple or list of them; its type is the key's type. ``None``
            takes any of these, ``{}`` makes a free-form section whose keys are nobody's business.
        meaning: one sentence or two, with the unit.
        choices: the only texts allowed, in the spelling that the code reads, or the only numbers.
        aliases: further spellings, each with the choice that it stands for.
        of: the type of the elements of a sequence; needed where the default is empty.
        low, above, high: bounds of a number, or of each in a sequence: at least, more than, at most.
        length: how many elements a sequence has; None for any number.
        forms: the forms of an image size in words, e.g. ``(height, width) or (side,)``: one or two positive numbers
            up to ``high``, or ``(0,)`` where ``low`` is 0. Empty for keys that are not an image size.
        nested: a free-form section takes sections as values, ``{a: {b: 1}}``, and keeps them as ``{a.b: 1}``.
    """

    path: str
    default: Any
    meaning: str
    choices: tuple[str, ...] | tuple[int, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    of: type | None = None
    low: float | None = None
    above: float | None = None
    high: float | None = None
    length: int | None = None
    forms: str = ""
    nested: bool = False

    @property
    def bounds(self) -> str:
        """The bounds in words, empty when there are none."""
        if self.forms:
            return f"{self.forms}, each at most {self.high:g}"
        parts = [(self.low, "at least"), (self.above, "more than"), (self.high, "at most")]
        words = [
            f"{word} {bound if isinstance(bound, int) else format(bound, 'g')}"
            for bound, word in parts
            if bound is not None
        ]
        return " and ".join([*words, *([f"{self.length} numbers"] if self.length else [])])

    @property
    def expected(self) -> str:
        """What values are, in words."""
        if self.is_free_form:
            return "a section of any keys"
        if isinstance(self.default, tuple | list):
            return f"a list of {_EXPECTED_MANY[self.element_type]}"
        return _EXPECTED[None if self.default is None else type(self.default)]

    @property
    def is_free_form(self) -> bool:
        """Whether the key is a section that takes any key."""
        return isinstance(self.default, Mapping)

    @property
    def element_type(self) -> type | None:
        """The type of a sequence's elements; float for a mix of int and float, None when nothing tells."""
        types = {type(element) for element in self.default}
        if self.of or not types:
            return self.of
        if types == {int, float}:
            return float
        return types.pop() if len(types) == 1 and types < {bool, int, float, str} else None


def parse_bool(value: Any) -> bool | None:
    """Return the bool that ``value`` is or spells (true/false, yes/no, on/off in any case), else None."""
    value = plain(value)
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def convert(key: Key, value: Any) -> Any:
    """Return ``value`` as the type of ``key``, where that loses nothing.

    Args:
        key: not free-form.
        value: from YAML, a command line or code.

    Raises:
        ConfigError: the value cannot be that type, is None where the key takes no None, is not among the choices, or
            is out of bounds.
    """
    converted = _converted(key, value)
    elements = converted if isinstance(converted, tuple | list) else [converted]
    if key.forms:
        sides = len(elements) in (1, 2) and all(1 <= element <= key.high for element in elements)
        if not sides and not (key.low == 0 and tuple(elements) == (0,)):
            raise ConfigError(f"{key.path} needs {key.bounds}; got {brief(converted)}")
        return converted
    wrong_length = key.length is not None and len(elements) != key.length
    if wrong_length or any(_out_of_bounds(key, element) for element in elements):
        raise ConfigError(f"{key.path} is {brief(converted)}; it must be {key.bounds}")
    return converted


def _out_of_bounds(key: Key, number: Any) -> bool:
    return (
        (key.low is not None and number < key.low)
        or (key.above is not None and number <= key.above)
        or (key.high is not None and number > key.high)
    )


def _converted(key: Key, value: Any) -> Any:
    """Return ``value`` as the type of ``key``, bounds aside."""
    value = plain(value)
    if key.default is None:
        return free_value(key.path, value)
    if isinstance(value, str) and value == key.default and not key.choices:
        return value  # "none" among others, which elsewhere stands for nothing
    if isinstance(key.default, tuple | list):
        if isinstance(value, str):
            value = _split(key, value)
        elements = value if isinstance(value, tuple | list) else [value]
        return type(key.default)(
            free_value(key.path, element)
            if key.element_type is None
            else _scalar(key.path, key.element_type, plain(element), key.expected)
            for element in elements
        )
    if key.choices and isinstance(key.default, str):
        return _choice(key, value)
    converted = _scalar(key.path, type(key.default), value, key.expected)
    if key.choices and converted not in key.choices:
        raise _not_among_choices(key, value)
    return converted


def free_value(path: str, value: Any, nested: bool = False) -> Any:
    """Return ``value`` for a key whose type nobody declared: a number where text spells one, lists as tuples.

    Raises:
        ConfigError: the value is neither a scalar nor a flat list of scalars.
    """
    value = plain(value)
    if isinstance(value, str):
        if not _is_clean(value):
            raise _wrong(path, "text in UTF-8 without the character 0", value)
        number, word = _number(value), value.strip().lower()
        if number is not None and not _is_huge(number):
            return number
        if word in _NONE:
            return None
        if word in ("true", "false"):
            return word == "true"
        if nested or not value.strip().startswith(("[", "(")):
            return value
        value = _split(Key(path, (), ""), value)
    if isinstance(value, tuple | list) and not nested:
        return tuple(free_value(path, element, nested=True) for element in value)
    if value is None or (isinstance(value, bool | int | float) and not _is_huge(value)):
        return value
    raise _wrong(path, "a number, text, true/false or a flat list of them", value)


def parse_literal(text: str) -> Any:
    """Return the Python literal that ``text`` is, without running anything; None if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd escapes in text that is only data here
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def plain(value: Any) -> Any:
    """Return NumPy scalars and arrays as Python's numbers and lists, and paths as text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def show_value(value: Any) -> str:
    """Return a config's value as it would be written in YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(show_value(item) for item in value)}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return value if isinstance(value, str) and value else repr(value)


def brief(value: Any) -> str:
    """Return ``repr(value)``, cut where it would fill the terminal."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a huge integer"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _wrong(path: str, expected: str, value: Any) -> ConfigError:
    if value is None:
        return ConfigError(f"{path}: expected {expected}, got nothing (null); remove the line, or give a value")
    return ConfigError(f"{path}: expected {expected}, got {brief(value)} ({type(value).__name__})")


def _choice(key: Key, value: Any) -> str:
    # YAML 1.1 reads a bare on or off as a bool.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    by_lower = {choice.lower(): choice for choice in key.choices} | {k.lower(): v for k, v in key.aliases.items()}
    found = by_lower.get(word.strip().lower()) if isinstance(word, str) else None
    if found is None:
        raise _not_among_choices(key, value, did_you_mean(str(word), by_lower))
    return found


def _not_among_choices(key: Key, value: Any, hint: str = "") -> ConfigError:
    choices = ", ".join(map(str, key.choices))
    return ConfigError(f"{key.path}: {brief(value)} is not one of the choices.{hint}\n  choices: {choices}")


def _scalar(path: str, kind: type, value: Any, expected: str) -> Any:
    """Convert to bool, int, float or str, or raise."""
    wrong = _wrong(path, expected, value)
    if kind is bool:
        flag = parse_bool(value)
        if flag is None:
            raise wrong
        return flag
    if isinstance(value, bool):
        raise wrong
    if kind is str:
        if isinstance(value, str) and value.strip().lower() in _NONE:
            raise ConfigError(f"{path}: expected {expected}, got {value!r}; for none at all write an empty text ''")
        if not isinstance(value, str | int | float) or _is_huge(value) or not _is_clean(str(value)):
            raise wrong
        return str(value)
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, int | float):
        raise wrong
    try:
        converted = kind(number)
    except (OverflowError, ValueError):  # int(inf), int(nan), float(10**400)
        raise wrong from None
    if converted != number or _is_huge(converted):  # a NaN differs from itself
        raise wrong
    return converted


def _is_clean(text: str) -> bool:
    """Whether a file could have the name ``text``: it has no character 0, and is UTF-8 or what a file name had."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _is_huge(value: Any) -> bool:
    """Whether an integer does not fit in the 64 bits that tensors have for it."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return None if math.isnan(number) else number
    return None


def _split(key: Key, text: str) -> list[Any]:
    """Return the elements of ``(a, b)``, ``[1, 2]`` or ``1,2``; empty text has none, any other is one."""
    text = text.strip()
    if not text:
        return []
    value = parse_literal(text)
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, str):
        return [value]
    closer = {"[": "]", "(": ")"}.get(text[:1])
    if closer and text.endswith(closer):
        pieces = (piece.strip().strip("'\"") for piece in text[1:-1].split(","))
        return [piece for piece in pieces if piece]
    if closer and closer not in text:
        raise ConfigError(f"{key.path}: {brief(text)} opens a list with {text[0]!r} and never closes it")
    return [text]
