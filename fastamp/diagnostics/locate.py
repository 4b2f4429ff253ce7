"""Find the first module that made a value which is not finite, in the forward or in the backward pass."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.amp.fp32 import forced_modules
from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.amp.refusal import is_out_of_memory
from fastamp.diagnostics.rehearsal import Rehearsal, batch_size, part_of
from fastamp.utils.compiled import uncompiled

Key = tuple[str, str, int]
"""What happened, in which module, in which of its calls."""


@dataclass(frozen=True)
class Location:
    """Where the first value that is not finite was made.

    Attributes:
        kind: ``"forward overflow"``, ``"backward overflow"``, ``"loss-scale overflow"`` (the gradients are finite under
            a smaller loss scale), ``"not finite in float32"`` (the precision is not to blame), ``"batch not finite"``.
        module: name of the module; ``""`` is the whole model.
        module_class: name of its class.
        part: what of it: ``"output"``, ``"gradient of its input"``, ``"gradient of <parameter>"``, or
            ``"between its parts, before <module>"``.
        dtype: of the value.
        inputs_finite: whether what the module was given, or the gradient that came to it, was finite.
        input_magnitude: the largest magnitude of its inputs.
        float32_magnitude: the largest magnitude of the same value in float32; None where it was not seen.
        parameter_magnitude: the largest magnitude of the module's own parameters; None when it has none.
        loss_scale: the loss scale of the pass.
        safe_scale: the largest power of two under which the gradients are finite; None but for a loss-scale overflow.
        neighbours: where it is between a module's parts, the last layer before it, and the one that came next.
        forced: modules that ``SOLVER.AMP.FORCE_FP32`` names already.
        position: how many values were looked at before it.
    """

    kind: str
    module: str
    module_class: str
    part: str
    dtype: str
    inputs_finite: bool
    input_magnitude: float
    float32_magnitude: float | None
    parameter_magnitude: float | None
    loss_scale: float
    safe_scale: float | None = None
    neighbours: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    position: int = 0

    @property
    def order(self) -> int:
        """Lower for what is nearer to the beginning: of the finds of several processes the lowest is the cause."""
        kinds = ("batch not finite", "not finite in float32", "forward overflow", "backward overflow")
        return (kinds.index(self.kind) if self.kind in kinds else len(kinds)) * 10**6 + self.position

    @property
    def name(self) -> str:
        """The module's name and class, e.g. ``"backbone.layer4.0.conv2 (Conv2d)"``."""
        return f"{self.module or 'the model itself'} ({self.module_class})"

    def describe(self) -> str:
        """Return what was found and what to do about it, in a few lines."""
        if self.kind == "batch not finite":
            return "batch not finite: what the model was given has infinite or NaN values already"
        lines = [f"{self.kind} in {self.name}: {self.part} is the first value that is not finite, {self.dtype}"]
        details = []
        if self.input_magnitude:
            state = "finite" if self.inputs_finite else "not finite"
            details.append(f"its inputs are {state}, up to {self.input_magnitude:.4g}")
        if self.float32_magnitude is not None and self.kind != "not finite in float32":
            details.append(f"in float32 the same value is up to {self.float32_magnitude:.4g}")
        limit = torch.finfo(getattr(torch, self.dtype)).max
        if self.parameter_magnitude is not None and self.parameter_magnitude > limit:
            details.append(f"its parameters are up to {self.parameter_magnitude:.4g}")
        if self.dtype != "float32":
            details.append(f"{self.dtype} ends at {limit:.4g}")
        if details:
            lines.append("  " + "; ".join(details))
        if self.kind in ("loss-scale overflow", "backward overflow"):
            lines.append(f"  under loss scale {self.loss_scale:g}")
        lines.append("  fix:   " + self.fix())
        return "\n".join(lines)

    def fix(self) -> str:
        """Return what to change."""
        if self.kind == "not finite in float32":
            return "look at the data, the loss and SOLVER.BASE_LR: mixed precision is not the cause"
        if self.kind == "loss-scale overflow":
            scale = f"{self.safe_scale:g}" if self.safe_scale else "of a smaller power of two"
            return (
                f"SOLVER.AMP.INIT_SCALE {scale} (MIN_SCALE no larger), or SOLVER.AMP.DTYPE bfloat16, which needs none"
            )
        # A function between two layers computes in float32 when what comes in does.
        names = [name for name in self.neighbours if name] if self.part.startswith("between") else [self.module]
        names = list(dict.fromkeys([*self.forced, *names])) if any(names) else []
        here = f'SOLVER.AMP.FORCE_FP32 "{names}"' if names else "compute that part in float32 (fastamp.amp.force_fp32)"
        others = "" if self.dtype == "bfloat16" else ", or SOLVER.AMP.DTYPE bfloat16"
        return f"{here}{others}; tools/amp_doctor.py finds all modules that need it"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


def locate(rehearsal: Rehearsal, policy: PrecisionPolicy, *, scale: float = 1.0) -> Location | None:
    """Find where the first value that is not finite is made in a training step under ``policy``.

    Values that are infinite in float32 as well, e.g. a mask of minus infinity, do not count where the float32 step is
    finite.

    Args:
        rehearsal: model and batch.
        policy: the precision in which something goes wrong.
        scale: the loss scale that was in force.

    Returns:
        None when losses and gradients are finite.
    """
    reference = _observe_training(rehearsal, policy.in_float32(), 1.0)
    if reference.failed:
        return reference.location("not finite in float32", 1.0)
    if not policy.enabled:
        return None
    low = _observe_training(rehearsal, policy, scale, reference)
    if not low.failed:
        return None
    if low.first is not None and low.first[0] in ("output", "input"):
        return low.location("forward overflow", scale)
    if scale != 1.0:
        unscaled = _observe_training(rehearsal, policy, 1.0, reference)
        if not unscaled.failed:
            safe = largest_finite_scale(rehearsal, policy, scale)
            return low.location("loss-scale overflow", scale, safe_scale=safe)
        low = unscaled
    return low.location("backward overflow", 1.0)


def search(
    model: nn.Module,
    batch: dict[str, Any],
    find: Callable[[Rehearsal], Location | None],
    *,
    random: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
) -> tuple[Location | None, str]:
    """Locate as well as it can be done: what is searched for must not be lost with the search.

    Args:
        model, batch, random, frozen: see ``Rehearsal``. Where float32 does not fit into memory with the whole batch, a
            half of it is searched, and so on.
        find: ``locate`` or ``locate_in_evaluation`` under a policy.

    Returns:
        The location, if there is one, and if the search itself failed, why.
    """
    count = batch_size(batch)
    while True:
        try:
            with Rehearsal(model, part_of(batch, count), random=random, frozen=frozen) as rehearsal:
                return find(rehearsal), ""
        except Exception as error:
            if not is_out_of_memory(error) or count < 8:
                why = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
                return None, f"(the place could not be searched: {why})"
        count //= 2


def locate_in_evaluation(rehearsal: Rehearsal, policy: PrecisionPolicy) -> Location | None:
    """Find where the first value that is not finite is made in an evaluation under ``policy``; None if all are."""
    rehearsal.first_statistics()
    reference = _Observer(rehearsal.model, "float32")
    with reference.watching():
        reference.failed = not all_finite(rehearsal.evaluate(policy.in_float32()))
    if reference.failed:
        return reference.location("not finite in float32", 1.0)
    low = _Observer(rehearsal.model, dtype_name(policy.dtype), reference)
    with low.watching():
        low.failed = not all_finite(rehearsal.evaluate(policy))
    return low.location("forward overflow", 1.0) if low.failed else None


def describe_evaluation(model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy) -> str:
    """Return where an evaluation of ``batch`` first makes a value that is not finite, and the fix; empty if nowhere.

    Args:
        model: in evaluation mode.
        batch: its features are not finite.
        policy: the precision of the evaluation.
    """
    with Rehearsal(model, batch) as rehearsal:
        location = locate_in_evaluation(rehearsal, policy)
    if location is None:
        return ""
    overflows = location.kind == "forward overflow"
    return location.describe() + "\n  or:    SOLVER.AMP.EVAL_DTYPE float32, to evaluate in float32" * overflows


def largest_finite_scale(rehearsal: Rehearsal, policy: PrecisionPolicy, start: float) -> float | None:
    """Return the largest power of two up to ``start`` under which the gradients are finite.

    ``start`` itself, whatever number it is, is tried first. None when they are not finite at 1.
    """

    def finite(scale: float) -> bool:
        return rehearsal.train(policy, scale=scale).finite

    if finite(start):
        return start
    low, high = 0, _exponent_below(start)
    if high < 0 or not finite(1.0):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if finite(2.0**middle) else (low, middle - 1)
    return 2.0**low


def _exponent_below(number: float) -> int:
    """Return the largest n with 2**n < ``number``."""
    mantissa, exponent = torch.frexp(torch.tensor(number, dtype=torch.float64))
    return int(exponent) - (2 if mantissa == 0.5 else 1)


def all_finite(value: Any) -> bool:
    """Return whether every floating-point tensor nested in ``value`` is finite; reads the device."""
    return all(bool(torch.isfinite(t).all()) for t in tensors_in(value))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the non-empty floating-point tensors nested in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def magnitude(value: Any) -> float:
    """Return the largest finite magnitude in ``value``; 0 when there is none."""
    found = 0.0
    for tensor in tensors_in(value):
        sizes = tensor.detach().abs().float()
        found = max(found, float(torch.where(torch.isfinite(sizes), sizes, 0.0).max()))
    return found


def _observe_training(
    rehearsal: Rehearsal, policy: PrecisionPolicy, scale: float, reference: "_Observer | None" = None
) -> "_Observer":
    observer = _Observer(rehearsal.model, dtype_name(policy.dtype), reference)
    with observer.watching():
        observer.failed = not rehearsal.train(policy, scale=scale).finite
    return observer


class _Observer:
    """Watches every module's inputs, outputs and gradients during one pass.

    Args:
        model: the model.
        policy_dtype: for values whose own dtype is not seen.
        reference: the observer of a float32 pass; what was not finite there is not counted.
    """

    def __init__(self, model: nn.Module, policy_dtype: str, reference: "_Observer | None" = None) -> None:
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
        self._looked_at = self._position = 0
        self._neighbours: tuple[str, ...] = ()
        self._stack: list[tuple[str, int, bool, float]] = []
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the hooks in place inside."""
        handles = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    handles.append(parameter.register_hook(self._watch_parameter(self.names[module], parameter_name)))
        try:
            with uncompiled(self.model):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def location(self, kind: str, scale: float, safe_scale: float | None = None) -> Location:
        """Return the first find as a location."""
        key = self.first
        if key is None:  # made outside of every module, e.g. in the loss that is added up
            key, self._part = ("output", "", 0), "the sum of its losses"
        elif key == ("input", "", 0):
            kind = "batch not finite"
        module = self.model.get_submodule(self._module)
        own = [p.detach() for p in module.parameters(recurse=False)]
        return Location(
            kind=kind,
            module=self._module,
            module_class=type(module).__name__,
            part=self._part,
            dtype=self._dtype,
            inputs_finite=self._inputs_finite,
            input_magnitude=self._input_magnitude,
            float32_magnitude=self.reference.magnitudes.get(key) if self.reference else None,
            parameter_magnitude=magnitude(own) if own else None,
            loss_scale=scale,
            safe_scale=safe_scale,
            neighbours=self._neighbours,
            forced=tuple(forced_modules(self.model)),
            position=self._position,
        )

    def _note(
        self, key: Key, value: torch.Tensor, *, module: str, part: str, inputs: tuple[bool, float] | None = None
    ) -> bool:
        """Look at one value; the first that is not finite and was in the reference is the find."""
        finite = bool(torch.isfinite(value).all())
        self._looked_at += 1
        self.magnitudes[key] = max(self.magnitudes.get(key, 0.0), magnitude(value))
        if finite:
            return True
        self.bad.add(key)
        if self.first is None and not (self.reference and key in self.reference.bad):
            self.first, self._position = key, self._looked_at
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
            part = f"between its parts, before {name}" if self._stack else "input"
            key = ("input", name, call)
            seen = self.first is not None
            finite &= self._note(key, tensor.detach(), module=parent[0], part=part, inputs=parent[2:])
            if not seen and self.first == key:
                self._neighbours = (self._last_layer, name)
        self._stack.append((name, call, finite, magnitude((args, kwargs))))
        if not torch.is_grad_enabled():
            return args, kwargs

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            # A view has the gradient that flows back through this module alone.
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
            self._note(("output", name, call), tensor.detach(), module=name, part="output", inputs=(finite, size))
            if tensor.requires_grad and torch.is_grad_enabled():
                key = ("gradient of output", name, call)
                self._watch(tensor, key, module=parent, part=f"between its parts, behind {name}, the gradient")

    def _watch(self, tensor: torch.Tensor, key: Key, *, module: str, part: str) -> None:
        def look(gradient: torch.Tensor) -> None:
            arriving = self.magnitudes.get(("gradient of output", *key[1:]), 0.0)
            self._note(key, gradient.detach(), module=module, part=part, inputs=(True, arriving))
            if self.first == key and key[0] == "gradient of output":
                self._neighbours = (key[1],)

        tensor.register_hook(look)

    def _watch_parameter(self, name: str, parameter_name: str) -> Callable[[torch.Tensor], None]:
        key = (f"gradient of {parameter_name}", name, 0)

        def look(gradient: torch.Tensor) -> None:
            arriving = self.magnitudes.get(("gradient of output", name, 0), 0.0)
            self._note(key, gradient.detach(), module=name, part=key[0], inputs=(True, arriving))
            if self.first == key and self.policy_dtype != "float32":
                self._dtype = self.policy_dtype  # it was cast to the parameter's float32 on its way

        return look


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it that has a gradient.

    Lists and dicts are passed on as they are: modules may write into them.
    """
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad and value.is_floating_point() else value
    if isinstance(value, tuple):
        items = [_mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
