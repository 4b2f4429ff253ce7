"""Hooks on the layers of a model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fastamp.utils.compiled import uncompiled


def leaf_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Map each module without submodules to its name."""
    return {module: name for name, module in model.named_modules() if next(module.children(), None) is None}


@contextmanager
def hooked(
    model: nn.Module,
    layers: dict[nn.Module, str],
    *,
    enter: Callable[..., None] | None = None,
    leave: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Register hooks on layers for the duration of the context.

    Args:
        model: the model; compiled parts run eagerly, so that hooks are called.
        layers: layer -> name.
        enter: called as ``enter(layer, args, kwargs)`` before a layer.
        leave: called as ``leave(layer, args, kwargs, output)`` after a layer.
    """
    with uncompiled(model), ExitStack() as handles:
        for layer in layers:
            if enter:
                handles.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
            if leave:
                handles.enter_context(layer.register_forward_hook(leave, with_kwargs=True))
        yield
