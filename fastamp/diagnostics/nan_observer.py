"""Hooks that find the first non-finite value among the inputs, outputs and gradients of modules."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fastamp.amp.fp32 import forced_modules, like
from fastamp.amp.policy import dtype_name
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.tensors import magnitude, tensors_in
from fastamp.utils.compiled import uncompiled

Key = tuple[str, str, int]
"""(kind of value, name of the module, number of its call)."""


class NonFiniteObserver:
    """Observer that checks the inputs, outputs and gradients of all modules during one pass.

    Args:
        model: the model.
        policy_dtype: name of the low precision; reported for gradients that were cast to float32 before the hook.
        reference: observer of a float32 pass; values that are not finite there are ignored.
    """

    def __init__(self, model: nn.Module, policy_dtype: str, reference: "NonFiniteObserver | None" = None) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.model = model
        self.policy_dtype = policy_dtype
        self.reference = reference
        self.failed = False
        self.first: Key | None = None
        self.bad: set[Key] = set()
        self.magnitudes: dict[Key, float] = {}
        self._part = ""
        self._dtype = policy_dtype
        self._module = ""
        self._inputs_finite = True
        self._input_magnitude = 0.0
        self._last_layer = ""
        self._checked = self._position = 0
        self._adjacent: tuple[str, ...] = ()
        self._stack: list[tuple[str, int, bool, float]] = []
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Register the hooks for the duration of the context."""
        with uncompiled(self.model), ExitStack() as handles:
            for module, name in self.names.items():
                handles.enter_context(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
                handles.enter_context(module.register_forward_hook(self._leave))
                for parameter_name, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad:
                        handles.enter_context(parameter.register_hook(self._watch_parameter(name, parameter_name)))
            yield

    def location(self, kind: str, scale: float, safe_scale: float | None = None) -> NonFiniteLocation:
        """Build the location of the first non-finite value."""
        key = self.first
        if key is None:  # computed outside of all modules, e.g. the sum of the losses
            key, self._part = ("output", "", 0), "the sum of its losses"
        elif key == ("input", "", 0):
            kind = "batch not finite"
        module = self.model.get_submodule(self._module)
        parameters = [p.detach() for p in module.parameters(recurse=False)]
        return NonFiniteLocation(
            kind=kind,
            module=self._module,
            module_class=type(module).__name__,
            part=self._part,
            dtype=self._dtype,
            inputs_finite=self._inputs_finite,
            input_magnitude=self._input_magnitude,
            float32_magnitude=self.reference.magnitudes.get(key) if self.reference else None,
            parameter_magnitude=magnitude(parameters) if parameters else None,
            loss_scale=scale,
            safe_scale=safe_scale,
            adjacent=self._adjacent,
            forced=tuple(forced_modules(self.model)),
            position=self._position,
        )

    def _record(
        self, key: Key, value: torch.Tensor, *, module: str, part: str, inputs: tuple[bool, float] | None = None
    ) -> bool:
        """Record one value; return True if it is finite. Values that are not finite in the reference are ignored."""
        finite = bool(torch.isfinite(value).all())
        self._checked += 1
        self.magnitudes[key] = max(self.magnitudes.get(key, 0.0), magnitude(value))
        if finite:
            return True
        self.bad.add(key)
        if self.first is None and not (self.reference and key in self.reference.bad):
            self.first, self._position = key, self._checked
            self._module, self._part = module, part
            self._dtype = dtype_name(value.dtype)
            self._inputs_finite, self._input_magnitude = inputs or (True, 0.0)
        return False

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        name = self.names[module]
        call = self._calls[name]
        self._calls[name] += 1
        parent = self._stack[-1] if self._stack else (name, 0, True, 0.0)
        finite = True
        for tensor in tensors_in((args, kwargs)):
            part = f"between its submodules, before {name}" if self._stack else "input"
            key = ("input", name, call)
            seen = self.first is not None
            finite &= self._record(key, tensor.detach(), module=parent[0], part=part, inputs=parent[2:])
            if not seen and self.first == key:
                self._adjacent = (self._last_layer, name)
        self._stack.append((name, call, finite, magnitude((args, kwargs))))
        if not torch.is_grad_enabled():
            return args, kwargs

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            # A hook on a view sees only the gradient that flows back through this module.
            view = tensor.view_as(tensor)
            self._watch(view, ("gradient of its input", name, call), module=name, part="gradient of its input")
            return view

        return _mapped(args, watched), {key: _mapped(value, watched) for key, value in kwargs.items()}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name, call, finite, size = self._stack.pop()
        parent = self._stack[-1][0] if self._stack else name
        if next(module.children(), None) is None:
            self._last_layer = name
        for tensor in tensors_in(output):
            self._record(("output", name, call), tensor.detach(), module=name, part="output", inputs=(finite, size))
            if tensor.requires_grad and torch.is_grad_enabled():
                key = ("gradient of output", name, call)
                self._watch(tensor, key, module=parent, part=f"between its submodules, gradient after {name}")

    def _watch(self, tensor: torch.Tensor, key: Key, *, module: str, part: str) -> None:
        def check(gradient: torch.Tensor) -> None:
            incoming = self.magnitudes.get(("gradient of output", *key[1:]), 0.0)
            self._record(key, gradient.detach(), module=module, part=part, inputs=(True, incoming))
            if self.first == key and key[0] == "gradient of output":
                self._adjacent = (key[1],)

        tensor.register_hook(check)

    def _watch_parameter(self, name: str, parameter_name: str) -> Callable[[torch.Tensor], None]:
        key = (f"gradient of {parameter_name}", name, 0)

        def check(gradient: torch.Tensor) -> None:
            incoming = self.magnitudes.get(("gradient of output", name, 0), 0.0)
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            self._record(key, gradient.detach(), module=name, part=key[0], inputs=(True, incoming))
            if self.first == key and self.policy_dtype != "float32":
                self._dtype = self.policy_dtype  # autograd has cast it to the float32 of the parameter

        return check


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply ``function`` to a tensor or each tensor in a tuple, if the tensor requires a gradient.

    Lists and dicts are returned unchanged, because modules may write into them.
    """
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad and value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [_mapped(item, function) for item in value]
        return like(value, items)
    return value
