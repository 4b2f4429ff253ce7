"""Regions that compute in float32 under every precision policy, in training and evaluation."""

import copy
import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from fastamp.utils.errors import ConfigError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_DEVICE_TYPES = ("cpu", "cuda", "mps")
_FP32_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def to_float32(value: Any) -> Any:
    """Cast all float16 and bfloat16 tensors in a nested structure of lists, tuples and dicts to float32.

    A structure without such tensors is returned itself, not a copy, so that a module can still modify its arguments in
    place, e.g. a cache.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOW_PRECISION else value
    if isinstance(value, dict):
        cast = {key: to_float32(item) for key, item in value.items()}
        if all(cast[key] is value[key] for key in cast):
            return value
        changed = copy.copy(value)  # keeps subclasses of dict
        changed.update(cast)
        return changed
    if isinstance(value, (list, tuple)):
        items = [to_float32(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return like(value, items)
    return value


def like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the class of ``value`` with other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def force_fp32(function: F) -> F:
    """Decorate a function or the ``forward`` of a module so that it computes in float32.

    Autocast is disabled on every device type where it is enabled, and float16 and bfloat16 arguments are cast to
    float32 (float64 is kept). This holds in training, in evaluation, under ``no_grad`` and under ``inference_mode``: a
    region that computed in float32 only while gradients are enabled would return different features, or NaN, in
    evaluation.
    """

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        # One context for each call, not an ExitStack, which would break the graph of a compiled model.
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    return in_float32(*args, **kwargs)
        return function(*to_float32(args), **to_float32(kwargs))

    in_float32.is_fp32_region = True  # type: ignore[attr-defined]
    return in_float32  # type: ignore[return-value]


def is_fp32_region(function: Any) -> bool:
    """Return True for a function that ``force_fp32`` decorates."""
    marked: bool = getattr(function, "is_fp32_region", False)  # other decorators copy the attribute
    return marked


def _is_float32_module(module: nn.Module) -> bool:
    return bool(getattr(type(module), "force_fp32", False))  # a submodule may have this name


def forced_modules(model: nn.Module) -> list[str]:
    """List the names of the modules that ``SOLVER.AMP.FORCE_FP32`` turned into float32 regions."""
    return [
        name
        for name, module in model.named_modules()
        if vars(type(module)).get("__reduce__") is _reduce and not _is_float32_module(module)
    ]


def _fp32_class(module_class: type[nn.Module]) -> type[nn.Module]:
    """Create a subclass of ``module_class`` with a float32 region as ``forward``."""
    if module_class in _FP32_CLASSES:
        return _FP32_CLASSES[module_class]
    members = {
        "forward": force_fp32(module_class.forward),
        "__reduce__": _reduce,
        "__module__": module_class.__module__,
    }
    return _FP32_CLASSES.setdefault(module_class, type(module_class.__name__, (module_class,), members))


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    """Pickle a module by its original class, because the generated float32 subclass cannot be imported."""
    return _rebuild, (type(module).__bases__[0],), module.__dict__


def _rebuild(module_class: type[nn.Module]) -> nn.Module:
    return module_class.__new__(_fp32_class(module_class))


def apply_force_fp32(model: nn.Module, patterns: list[str] | tuple[str, ...]) -> list[str]:
    """Turn the modules of ``model`` that match ``patterns`` into float32 regions, in place.

    Modules of a class with ``force_fp32 = True`` become float32 regions regardless of ``patterns``. Only the class of
    the module changes, to a subclass of the same name: state dict, copies and hooks are unaffected.

    Args:
        model: the model.
        patterns: ``SOLVER.AMP.FORCE_FP32``: globs over module names (``"backbone.layer4.*"``) or class names
            (``"Bottleneck"``).

    Returns:
        Sorted names of the modules that are float32 regions because of a pattern or the class attribute.

    Raises:
        ConfigError: if a pattern matches no module.
    """
    named = dict(model.named_modules())
    chosen = {name for name, module in named.items() if _is_float32_module(module)}
    for pattern in patterns:
        matches = {
            name
            for name, module in named.items()
            if (name and fnmatchcase(name, pattern)) or type(module).__name__ == pattern
        }
        if not matches:
            choices = [name for name in named if name] + sorted({type(module).__name__ for module in named.values()})
            raise ConfigError(
                f"SOLVER.AMP.FORCE_FP32: no module name and no class name in the model matches {pattern!r}."
                f"{did_you_mean(pattern, choices)}\n"
                "  fix: use a module name, a glob such as 'backbone.layer4.*', or a class name"
            )
        chosen |= matches
    for name in chosen:
        module = named[name]
        if "forward" in vars(module):  # forward was patched on the instance, which hides that of the class
            module.forward = force_fp32(module.forward)
        elif not is_fp32_region(type(module).forward):
            module.__class__ = _fp32_class(type(module))
    return sorted(chosen)
