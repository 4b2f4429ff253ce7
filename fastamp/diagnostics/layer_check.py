"""Check each layer in low precision: against itself, and against float32 on the same inputs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.amp.fp32 import force_fp32
from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.diagnostics.isolated_passes import IsolatedPasses, restore_generator
from fastamp.diagnostics.layer_hooks import hooked, leaf_layers
from fastamp.diagnostics.tensors import cloned, relative_error, tensors_in
from fastamp.utils.env import random_state, set_random_state
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "embedding_cosine": "fastamp.diagnostics.tensors.embedding_cosine",
    },
)

_PRODUCTS = (nn.modules.conv._ConvNd, nn.Linear)
"""Layers whose inputs and weights autocast rounds to the low precision."""

_ROUND_ONCE = ("conv", "linear", "batchnorm", "instancenorm", "normalization", "pooling", "activation")
"""Modules of ``torch.nn.modules`` whose layers round only their result, and so can be compared with float32."""

_ROUND_MORE = (nn.Tanhshrink, nn.LocalResponseNorm, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)
"""Layers among these that are several operations."""

_ROUNDINGS = 6
"""Allowed relative L2 difference to float32, in unit roundoffs. Rounding the output once gives 0.3 to 1."""


@dataclass(frozen=True)
class LayerError:
    """A layer whose result in low precision is wrong by more than rounding explains.

    Attributes:
        name, kind: the module's name (``""`` is the model itself) and class.
        dtype: the low precision.
        repeated: relative L2 difference between two calls with the same input and random state; infinity where one is
            not finite.
        error: relative L2 difference to the layer in float32, from the same (rounded) input and weights.
        limit: what rounding explains of the larger of the two.
    """

    name: str
    kind: str
    dtype: str
    repeated: float
    error: float
    limit: float

    def describe(self) -> str:
        """Return what was found, the cause and the fix, in a few lines."""
        where = f"{self.name or 'the model itself'} ({self.kind})"
        if self.repeated:
            found = f"{where} returns different values for the same input in {self.dtype}"
            difference, cause = self.repeated, "returns different values from call to call"
        else:
            found = f"{where} in {self.dtype} differs from float32 on the same input"
            difference, cause = self.error, "computes something else"
        size = f"relative difference {difference:.2g}" if math.isfinite(difference) else "one of them is not finite"
        fix = f"SOLVER.AMP.FORCE_FP32 \"['{self.name}']\", or " if self.name else ""
        return (
            f"{found}: {size}; rounding explains {self.limit:.2g}.\n"
            f"  cause: the kernel of this device or PyTorch version {cause}, or the layer's own code does.\n"
            f"  fix:   {fix}SOLVER.AMP off, or another version of PyTorch"
        )


def check_layers(passes: IsolatedPasses, policy: PrecisionPolicy) -> tuple[list[LayerError], Any]:
    """Compare layers in low precision with themselves and with float32, in evaluation mode.

    Each layer (module without modules in it) is called a second time with the input that it gets under ``policy`` and
    the same random state. PyTorch's layers that round once are also called in float32, from the same input and weights
    as rounded by autocast. What remains is the rounding of the output and the order of summation, whatever the depth,
    the training and the input of the model. Finally, the whole model runs a second time.

    Args:
        passes: model and batch.
        policy: the low precision.

    Returns:
        The layers that are wrong, in the order of their calls; what the model returned, as float32.
    """
    watcher = _LayerCheck(passes.model, policy.dtype)
    passes.initial_statistics()
    with watcher.watching():
        output = passes.evaluate(policy)
    wrong = list(watcher.errors.values())
    if not wrong and not _same(output, passes.evaluate(policy)):
        error = _first_difference(passes, policy)
        wrong = [error] if error else []
    return wrong, output


def _flat(output: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return all floating-point tensors in ``output`` side by side."""
    parts = [t.detach().to(dtype).reshape(-1) for t in tensors_in(output)]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _first_difference(passes: IsolatedPasses, policy: PrecisionPolicy) -> LayerError | None:
    """Run the model twice in evaluation mode; return the first module to end with another output, if there is one."""
    unit = torch.finfo(policy.dtype).eps / 2
    modules = {module: name for name, module in passes.model.named_modules()}
    runs: list[list[tuple[nn.Module, torch.Tensor]]] = []
    for _ in range(2):
        seen: list[tuple[nn.Module, torch.Tensor]] = []

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any, seen: list = seen) -> None:
            parts = [t.detach().reshape(-1) for t in tensors_in(output)]
            if parts:
                seen.append((module, torch.cat([t[:: max(1, t.numel() // 4096)].float() for t in parts])))

        with hooked(passes.model, modules, leave=leave):
            passes.evaluate(policy)
        runs.append(seen)
    for (module, first), (_, second) in zip(*runs, strict=False):
        repeated = 0.0 if _same(first, second) else relative_error(second, first)
        if repeated > unit:
            return LayerError(
                modules[module], type(module).__name__, dtype_name(policy.dtype), repeated, math.nan, unit
            )
    return None


class _LayerCheck:
    """Compare each layer with itself and with float32 while the model runs.

    Args:
        model: the model.
        dtype: the low precision.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.layers = leaf_layers(model)
        self.errors: dict[str, LayerError] = {}
        self.largest: dict[str, float] = {}
        self._calls: list[tuple[Any, dict[str, Any], list[Callable[[], Any]]]] = []
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the hooks in place inside."""
        with hooked(self.model, self.layers, enter=self._enter, leave=self._leave):
            yield

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside:
            own = [restore for value in vars(layer).values() if (restore := restore_generator(value)) is not None]
            kept = args if _is_pytorchs(layer) and not getattr(layer, "inplace", False) else cloned(args)
            self._calls.append((kept, random_state(), own))

    def _leave(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._inside:
            return
        args, before, generators = self._calls.pop()
        if not any(True for _ in tensors_in(output)):
            return
        name, after, unit = self.layers[layer], random_state(), torch.finfo(self.dtype).eps / 2
        self._inside = True
        try:
            set_random_state(before)
            for restore in generators:
                restore()
            second = layer(*self._given(layer, args), **kwargs)
            repeated = 0.0 if _same(output, second) else relative_error(_flat(second), _flat(output))
            limit, error = unit, 0.0
            if repeated <= unit:
                repeated = 0.0
                if _is_pytorchs(layer) and not _draws(before, random_state()):
                    limit = _ROUNDINGS * unit
                    error = self._error(layer, args, kwargs, output, limit)
        finally:
            self._inside = False
            set_random_state(after)
        self.largest[name] = max(self.largest.get(name, 0.0), error)
        if (repeated or error > limit) and name not in self.errors:
            kind = type(layer).__name__
            self.errors[name] = LayerError(name, kind, dtype_name(self.dtype), repeated, error, limit)

    def _given(self, layer: nn.Module, args: Any) -> Any:
        """Return the arguments for one more call, which may write into them if the layer works in place."""
        return cloned(args) if getattr(layer, "inplace", False) or not _is_pytorchs(layer) else args

    def _error(self, layer: nn.Module, args: Any, kwargs: Any, output: Any, limit: float) -> float:
        """Return the smallest relative difference to float32 over what autocast may have rounded.

        It is 0 where float32 itself is not finite, or beyond the low precision's range: the locator names these.
        """
        error, low_output = math.inf, _flat(output)
        low = isinstance(layer, _PRODUCTS) and any(t.dtype == self.dtype for t in tensors_in(output))
        # A product in low precision has both rounded; a subclass may compute its weight first, from an exact one.
        choices = [(True, True), (True, False)] if low else [(False, False)]
        for inputs, weights in choices:
            rounded = tuple(self._rounded(a) if inputs else a for a in args)
            with _parameters(layer, self._rounded if weights else None):
                reference = _flat(force_fp32(layer)(*self._given(layer, rounded), **kwargs))
                largest = float(reference.abs().max())
                if not largest <= torch.finfo(self.dtype).max:
                    return 0.0
                error = min(error, relative_error(low_output, reference))
                if limit < error < math.inf and reference.device.type != "mps":
                    # Below float32's own rounding error, e.g. of a difference of equals, nothing can be said.
                    exact = _flat(_in_float64(layer, rounded, kwargs), torch.float64)
                    noise = float(torch.linalg.vector_norm(reference - exact))
                    # Tiny outputs: half a step of the smallest numbers, of each element.
                    tiny = torch.finfo(self.dtype).smallest_normal * 2 * torch.finfo(self.dtype).eps
                    floor = 8 * noise + tiny * math.sqrt(reference.numel())
                    difference = float(torch.linalg.vector_norm(low_output - exact))
                    size = float(torch.linalg.vector_norm(exact))
                    if difference <= limit * size + floor:
                        return 0.0
            if error <= limit:
                break
        return error

    def _rounded(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype).float() if is_float else value


def _same(first: Any, second: Any) -> bool:
    """Return whether two results are equal, NaN included."""
    pairs = list(zip(tensors_in(first), tensors_in(second), strict=False))
    return all(
        a.shape == b.shape and (torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in pairs
    )


def _is_pytorchs(layer: nn.Module) -> bool:
    """Return whether a layer is one of PyTorch's that rounds once, or a convolution or linear layer derived from it."""
    package, _, module = type(layer).__module__.rpartition(".")
    known = package == "torch.nn.modules" and module in _ROUND_ONCE and not isinstance(layer, _ROUND_MORE)
    return isinstance(layer, _PRODUCTS) or known


def _draws(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether random numbers of PyTorch were drawn in between; in float32 they would be others."""
    return any(not torch.equal(before[key], after[key]) for key in ("torch", "cuda", "mps") if key in before)


@contextmanager
def _parameters(layer: nn.Module, function: Callable[[Any], Any] | None) -> Iterator[None]:
    """Have ``function`` of a layer's own parameters in their place inside; None changes nothing."""
    own = dict(layer._parameters)
    try:
        if function is not None:
            for name, parameter in own.items():
                if parameter is not None:
                    layer._parameters[name] = nn.Parameter(function(parameter.detach()), requires_grad=False)
        yield
    finally:
        layer._parameters.update(own)


def _in_float64(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the output of a layer in float64, its parameters and buffers included."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    buffers = dict(layer._buffers)
    with _parameters(layer, double):
        try:
            layer._buffers.update({name: double(buffer) for name, buffer in buffers.items()})
            return force_fp32(layer)(*(double(a) for a in args), **kwargs)
        finally:
            layer._buffers.update(buffers)
