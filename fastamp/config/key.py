"""Definition of config keys, and conversion of values to their types."""

import ast
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastamp.utils.errors import ConfigError, did_you_mean

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_NONE = ("none", "null")
_EXPECTED: dict[type | None, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    None: "a value",
}
_EXPECTED_MANY: dict[type | None, str] = {
    bool: "true/false",
    int: "integers",
    float: "numbers",
    str: "strings",
    None: "values",
}


@dataclass(frozen=True)
class Key:
    """A config key: path, default, description and constraints.

    Attributes:
        path: dotted, e.g. ``"SOLVER.BASE_LR"``.
        default: a bool, int, float, str, or a tuple or list of them; its type is the key's type. ``None`` accepts any
            of these types. ``{}`` makes a free-form section, whose keys are not validated.
        meaning: description in one or two sentences, with the unit.
        choices: allowed strings (values in another case are converted to these) or numbers. Default (): any value.
        aliases: alternative spelling -> choice.
        of: element type of a sequence; required if the default is empty.
        low, above, high: bounds of a number, or of each element of a sequence: low <= x, above < x, x <= high.
        length: number of elements of a sequence. Default None: any number.
        forms: accepted forms of an image size, for messages, e.g. ``(height, width) or (side,)``. The value is then one
            or two positive integers of at most ``high``, or ``(0,)`` if ``low`` is 0. Default "": the key is not an
            image size.
        nested: if True, a free-form section accepts sections as values: ``{a: {b: 1}}`` is stored as ``{a.b: 1}``.
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
        """Description of the bounds, e.g. "2 numbers, each at least 1"; empty if there are none."""
        if self.forms:
            return f"{self.forms}, each at most {self.high:g}"
        limits = [(self.low, "at least"), (self.above, "greater than"), (self.high, "at most")]
        text = " and ".join(
            f"{comparison} {limit if isinstance(limit, int) else format(limit, 'g')}"
            for limit, comparison in limits
            if limit is not None
        )
        if text and isinstance(self.default, tuple | list):
            text = f"each {text}"
        return ", ".join(filter(None, [f"{self.length} numbers" if self.length else "", text]))

    @property
    def expected(self) -> str:
        """Description of the type, e.g. "a list of integers"."""
        if self.is_free_form:
            return "a section with any keys"
        if isinstance(self.default, tuple | list):
            return f"a list of {_EXPECTED_MANY[self.element_type]}"
        return _EXPECTED[None if self.default is None else type(self.default)]

    @property
    def is_free_form(self) -> bool:
        """True if the key is a section that accepts any key."""
        return isinstance(self.default, Mapping)

    @property
    def element_type(self) -> type | None:
        """Element type of a sequence: float for a mix of int and float, None if it cannot be inferred."""
        types = {type(element) for element in self.default}
        if self.of or not types:
            return self.of
        if types == {int, float}:
            return float
        return types.pop() if len(types) == 1 and types < {bool, int, float, str} else None


def parse_bool(value: Any) -> bool | None:
    """Convert a bool, or true/false, yes/no or on/off as text in any case, to a bool; None for any other value."""
    value = plain(value)
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    return True if word in _TRUE else False if word in _FALSE else None


def convert(key: Key, value: Any) -> Any:
    """Convert a value to the type of a key, if the conversion is lossless.

    Args:
        key: a key that is not free-form.
        value: value from YAML, a command line or code.

    Raises:
        ConfigError: if the value has another type, is None and the key does not accept None, is not among the choices,
            or is out of bounds.
    """
    converted = _converted(key, value)
    elements = converted if isinstance(converted, tuple | list) else [converted]
    if key.forms:
        sides = len(elements) in (1, 2) and all(1 <= element <= key.high for element in elements)
        if not sides and not (key.low == 0 and tuple(elements) == (0,)):
            raise _bounds_error(key, key.path, key.bounds, converted)
        return converted
    wrong_length = key.length is not None and len(elements) != key.length
    if wrong_length or any(_out_of_bounds(key, element) for element in elements):
        subject = f"{key.path}: each element" if key.bounds.startswith("each ") else key.path
        raise _bounds_error(key, subject, key.bounds.removeprefix("each "), converted)
    return converted


def _out_of_bounds(key: Key, number: Any) -> bool:
    return (
        (key.low is not None and number < key.low)
        or (key.above is not None and number <= key.above)
        or (key.high is not None and number > key.high)
    )


def _converted(key: Key, value: Any) -> Any:
    """Convert a value to the type of a key, without checking the bounds."""
    value = plain(value)
    if key.default is None:
        return free_value(key.path, value)
    if isinstance(value, str) and value == key.default and not key.choices:
        return value  # e.g. "none", which is null elsewhere
    if isinstance(key.default, tuple | list):
        if value == key.default and all(isinstance(element, str) and _is_clean(element) for element in value):
            return type(key.default)(value)
        if isinstance(value, str):
            value = _split(key, value)
        elements = value if isinstance(value, tuple | list) else [value]
        return type(key.default)(
            free_value(key.path, element)
            if key.element_type is None
            else _scalar(key, key.element_type, plain(element))
            for element in elements
        )
    if key.choices and isinstance(key.default, str):
        return _choice(key, value)
    converted = _scalar(key, type(key.default), value)
    if key.choices and converted not in key.choices:
        raise _not_among_choices(key, value)
    return converted


def free_value(path: str, value: Any, nested: bool = False) -> Any:
    """Convert the value of a key without a declared type: numeric strings to numbers, lists to tuples.

    Strings in a list remain strings, e.g. ``["007", "none"]`` of a YAML file; those in the text of a list, e.g.
    ``"[7, none]"`` of a command line, are converted.

    Raises:
        ConfigError: if the value is neither a scalar nor a flat list of scalars.
    """
    value = plain(value)
    if isinstance(value, str):
        if not _is_clean(value):
            raise _type_error(path, "a UTF-8 string without null characters", value)
        number, word = _number(value), value.strip().lower()
        if number is not None and not _is_huge(number):
            return number
        if _is_none(value):
            return None
        if word in ("true", "false"):
            return word == "true"
        if nested or not value.strip().startswith(("[", "(")):
            return value
        return tuple(free_value(path, element, nested=True) for element in _split(Key(path, (), ""), value))
    if isinstance(value, tuple | list) and not nested:
        return tuple(
            element if isinstance(element, str) and _is_clean(element) else free_value(path, element, nested=True)
            for element in value
        )
    if value is None or (isinstance(value, bool | int | float) and not _is_huge(value)):
        return value
    raise _type_error(path, "a number, a string, true/false or a flat list of them", value)


def parse_literal(text: str) -> Any:
    """Parse a Python literal without executing code; None if ``text`` is not a literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escape sequences in the text
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def plain(value: Any) -> Any:
    """Convert NumPy scalars and arrays to Python numbers and lists, and paths to strings."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def show_value(value: Any) -> str:
    """Format a config value as in YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(show_value(item) for item in value)}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    return value if isinstance(value, str) and value else repr(value)


def brief(value: Any) -> str:
    """Return ``repr(value)``, truncated to 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "an integer of more than 4300 digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _type_error(path: str, expected: str, value: Any) -> ConfigError:
    if value is None:
        return ConfigError(f"{path}: expected {expected}, got null.\n  fix: set a value, or remove the key")
    fix = "write '' for an empty string" if _is_none(value) and "string" in expected else f"set {path} to {expected}"
    return ConfigError(f"{path}: expected {expected}, got {brief(value)} ({type(value).__name__}).\n  fix: {fix}")


def _bounds_error(key: Key, subject: str, bounds: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{subject} must be {bounds}; got {brief(value)}.\n"
        f"  fix: change {key.path}; its default is {show_value(key.default)}"
    )


def _choice(key: Key, value: Any) -> str:
    # YAML 1.1 reads a bare on or off as a bool.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    words = {str(choice): str(choice) for choice in key.choices} | dict(key.aliases)
    by_lower = {name.lower(): choice for name, choice in words.items()}
    named_choice = by_lower.get(word.strip().lower()) if isinstance(word, str) else None
    if named_choice is None:
        raise _not_among_choices(key, value, did_you_mean(str(word), by_lower))
    return named_choice


def _not_among_choices(key: Key, value: Any, hint: str = "") -> ConfigError:
    return ConfigError(f"{key.path}: unknown value {brief(value)}.{hint}\n  choices: {list_choices(key.choices)}")


def list_choices(choices: Iterable[str | int]) -> str:
    """Return the choices of a key as text; the empty string is shown as ``""``."""
    return ", ".join('""' if choice == "" else str(choice) for choice in choices)


def _scalar(key: Key, kind: type, value: Any) -> Any:
    """Convert a value to bool, int, float or str, or raise ConfigError."""
    converted = _lossless(kind, value)
    if converted is None:
        raise _type_error(key.path, key.expected, value)
    return converted


def _lossless(kind: type, value: Any) -> Any:
    """Convert a value to bool, int, float or str; None if that is impossible, or changes the value."""
    if kind is bool or isinstance(value, bool):
        return parse_bool(value) if kind is bool else None
    if kind is str:
        is_text = isinstance(value, str | int | float) and not _is_huge(value) and _is_clean(str(value))
        return str(value) if is_text and not _is_none(value) else None
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, int | float):
        return None
    try:
        converted = kind(number)
    except (OverflowError, ValueError):  # int(inf), int(nan), float(10**400)
        return None
    return None if converted != number or _is_huge(converted) else converted  # a NaN differs from itself


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in _NONE


def _is_clean(text: str) -> bool:
    """Return True if ``text`` has no null character and is UTF-8 or a surrogate-escaped file name."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _is_huge(value: Any) -> bool:
    """Return True for an integer that does not fit in int64."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return None if number != number else number  # NaN; math.isnan overflows for huge integers
    return None


def _split(key: Key, text: str) -> list[Any]:
    """Split ``(a, b)``, ``[1, 2]`` or ``1,2`` into elements; any other non-empty string is one element."""
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
        raise ConfigError(
            f"{key.path}: cannot parse {brief(text)}: missing {closer!r}.\n  fix: add {closer!r} at the end"
        )
    return [text]
