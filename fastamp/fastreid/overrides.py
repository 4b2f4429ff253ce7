"""Methods that a class written for FastReID overrides."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import CodeType


def overrides(cls: type, name: str, base: type) -> bool:
    """Return True if ``cls`` overrides the method ``name`` of ``base``."""
    return inspect.getattr_static(cls, name) is not inspect.getattr_static(base, name)


def warn_of_uncalled_methods(cls: type, base: type, never: Mapping[str, str] | None = None) -> None:
    """Warn about each method in the body of ``cls`` that looks like an override, but is never called.

    Args:
        cls: subclass of ``base``.
        base: class whose methods are called. A method of ``cls`` looks like an override if its name is similar to that
            of a method of ``base``, or begins with ``before_`` or ``after_``, and no method of ``cls`` uses the name.
        never: method of FastReID that is not called -> what to do instead. Default None.
    """
    functions = [getattr(value, "__func__", value) for value in vars(cls).values()]
    used = {name for function in functions if hasattr(function, "__code__") for name in _names(function.__code__)}
    called = [name for name in dir(base) if not name.startswith("_")]
    for name, function in zip(vars(cls), functions, strict=True):
        if not inspect.isfunction(function) or name in used or (name.startswith("_") and name not in (never or {})):
            continue
        similar = get_close_matches(name, called, 1, 0.85)
        if never and name in never:
            fix = never[name]
        elif name not in called and (similar or name.startswith(("before_", "after_"))):
            points = ", ".join(method for method in called if method.startswith(("before_", "after_")))
            fix = f"override {similar[0]}" if similar else f"override one of {points}"
        else:
            continue
        message = f"{cls.__name__}.{name} is never called: {base.__name__} has no such method.\n  fix: {fix}"
        warnings.warn(message, stacklevel=3)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function and the functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
