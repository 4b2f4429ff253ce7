"""FastReID's ``configurable`` decorator, and the config tree."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from yacs.config import CfgNode as YacsCfgNode

from fastamp.config import CfgNode, get_cfg

__all__ = ["CfgNode", "configurable", "get_cfg"]


def configurable(init: Callable[..., Any] | None = None, *, from_config: Callable[..., Any] | None = None) -> Any:
    """Let a function or an ``__init__`` be called either with its own arguments or with a config.

    ``@configurable`` decorates ``__init__`` of a class whose classmethod ``from_config(cfg, ...)`` returns the keyword
    arguments of ``__init__``. ``@configurable(from_config=f)`` decorates a function; ``f(cfg, ...)`` returns its
    keyword arguments. In a call, a config is the first argument or the keyword ``cfg``. Further arguments that
    ``from_config`` does not accept are passed to the decorated function.

    Raises:
        TypeError: if the class has no classmethod ``from_config``.
    """
    if init is None:
        return functools.partial(_configurable_function, from_config=from_config)
    if from_config is not None:
        return _configurable_function(init, from_config=from_config)
    if init.__name__ != "__init__":
        raise TypeError("@configurable: expected __init__; for a function, use @configurable(from_config=...)")

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_called_with_config(args, kwargs):
            init(self, *args, **kwargs)
            return
        if not inspect.ismethod(getattr(type(self), "from_config", None)):
            raise TypeError(f"{type(self).__name__}: @configurable requires a classmethod from_config")
        init(self, **_explicit_arguments(type(self).from_config, args, kwargs))

    return construct


def _configurable_function(function: Callable[..., Any], *, from_config: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_called_with_config(args, kwargs):
            return function(**_explicit_arguments(from_config, args, kwargs))
        return function(*args, **kwargs)

    return call


def is_called_with_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the first argument, or the keyword argument ``cfg``, is a config."""
    return isinstance(args[0] if args else kwargs.get("cfg"), YacsCfgNode)


def _explicit_arguments(
    from_config: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments from ``from_config``, and the arguments that it does not accept."""
    accepted = inspect.signature(from_config).parameters.values()
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in accepted):
        return from_config(*args, **kwargs)
    names = {parameter.name for parameter in accepted}
    others = {name: value for name, value in kwargs.items() if name not in names}
    return from_config(*args, **{name: value for name, value in kwargs.items() if name in names}) | others
