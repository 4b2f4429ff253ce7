"""Check of each layer in low precision: repeatability, and error relative to float32 on the same input."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.amp.fp32 import force_fp32
from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.diagnostics.isolated_passes import IsolatedPasses, restore_generator
from fastamp.diagnostics.layer_hooks import hooked, leaf_layers
from fastamp.diagnostics.tensors import cloned, relative_error, tensors_in
from fastamp.utils.env import random_state, set_random_state

_PRODUCTS = (nn.modules.conv._ConvNd, nn.Linear)
"""Layers with inputs and weights that autocast rounds to the low precision."""

_ROUND_ONCE = ("conv", "linear", "batchnorm", "instancenorm", "normalization", "pooling", "activation")
"""Modules of ``torch.nn.modules`` with layers that round only their result, so that float32 is a reference for them."""

_ROUND_MORE = (nn.Tanhshrink, nn.LocalResponseNorm, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)
"""Exceptions: layers that consist of several operations."""

_ROUNDINGS = 6
"""Largest allowed relative L2 error compared with float32, in unit roundoffs; rounding the output is 0.3 to 1."""


@dataclass(frozen=True)
class LayerError:
    """Layer with an error in low precision that rounding does not explain.

    Attributes:
        name, kind: name (``""`` is the whole model) and class of the module.
        dtype: name of the low precision.
        repeated: relative L2 difference between two calls with the same input and random state; infinity if one of
            them is not finite; 0 if they agree.
        error: relative L2 error compared with the layer in float32, with the same (rounded) input and weights.
        limit: largest difference or error that rounding can explain.
    """

    name: str
    kind: str
    dtype: str
    repeated: float
    error: float
    limit: float

    def describe(self) -> str:
        """Format the finding, its cause and the fix in a few lines."""
        where = f"{self.name or 'the model itself'} ({self.kind})"
        if self.repeated:
            description = f"{where} is not deterministic in {self.dtype}"
            difference, cause = self.repeated, "returns different values for the same input"
        else:
            description = f"{where} in {self.dtype} differs from float32 on the same input"
            difference, cause = self.error, "is wrong"
        size = f"relative difference {difference:.2g}" if math.isfinite(difference) else "one result is not finite"
        fix = f"SOLVER.AMP.FORCE_FP32 \"['{self.name}']\", or " if self.name else ""
        return (
            f"{description}: {size}, expected at most {self.limit:.2g} from rounding.\n"
            f"  cause: the kernel of this device or PyTorch version, or the code of the layer, {cause}.\n"
            f"  fix:   set {fix}SOLVER.AMP False, or use another version of PyTorch"
        )


def check_layers(passes: IsolatedPasses, policy: PrecisionPolicy) -> tuple[list[LayerError], Any]:
    """Check each layer in low precision, in evaluation mode.

    Each layer (module without submodules) is called again with the input that it gets under ``policy`` and the same
    random state. PyTorch layers that round once are also called in float32, with the input and weights rounded as by
    autocast. The remaining difference comes from rounding the output and from the order of summation, so that the
    tolerance does not depend on the depth, training or input of the model. If no error is found, the whole model runs
    again; if the output has changed, the first module with a different output is reported.

    Args:
        passes: passes of a model over a batch.
        policy: the low precision.

    Returns:
        ``(errors, output)``: the layer errors in call order, and the output of the model in float32.
    """
    check = _LayerCheck(passes.model, policy.dtype)
    passes.initial_statistics()
    with check.watching():
        output = passes.evaluate(policy)
    errors = list(check.errors.values())
    if not errors and not _same(output, passes.evaluate(policy)):
        error = _first_difference(passes, policy)
        errors = [error] if error else []
    return errors, output


def _flat(output: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Concatenate all floating-point tensors in ``output``."""
    parts = [t.detach().to(dtype).reshape(-1) for t in tensors_in(output)]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _first_difference(passes: IsolatedPasses, policy: PrecisionPolicy) -> LayerError | None:
    """Run the model twice in evaluation mode, and find the first module with a different output."""
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
    """Hooks that compare each layer with a second call and with float32.

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

    def watching(self) -> AbstractContextManager[None]:
        """Register the hooks for the duration of the context."""
        return hooked(self.model, self.layers, enter=self._enter, leave=self._leave)

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._inside:
            generators = [restore for value in vars(layer).values() if (restore := restore_generator(value))]
            saved = args if _rounds_once(layer) and not _overwrites(layer) else cloned(args)
            self._calls.append((saved, random_state(), generators))

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
            second = layer(*self._arguments(layer, args), **kwargs)
            repeated = 0.0 if _same(output, second) else relative_error(_flat(second), _flat(output))
            limit, error = unit, 0.0
            if repeated <= unit:
                repeated = 0.0
                if _rounds_once(layer) and not _draws(before, random_state()):
                    limit = _ROUNDINGS * unit
                    error = self._error(layer, args, kwargs, output, limit)
        finally:
            self._inside = False
            set_random_state(after)
        self.largest[name] = max(self.largest.get(name, 0.0), error)
        if (repeated or error > limit) and name not in self.errors:
            kind = type(layer).__name__
            self.errors[name] = LayerError(name, kind, dtype_name(self.dtype), repeated, error, limit)

    def _arguments(self, layer: nn.Module, args: Any) -> Any:
        """Return arguments for another call of ``layer``; they are copied if the layer may overwrite them."""
        return cloned(args) if _overwrites(layer) or not _rounds_once(layer) else args

    def _error(self, layer: nn.Module, args: Any, kwargs: Any, output: Any, limit: float) -> float:
        """Compute the error relative to float32; the smallest one, if autocast may round in several ways.

        The error is 0 if the float32 output is not finite or exceeds the range of the low precision, because the NaN
        locator reports this problem.
        """
        error, low_output = math.inf, _flat(output)
        low = isinstance(layer, _PRODUCTS) and any(t.dtype == self.dtype for t in tensors_in(output))
        # Autocast rounds inputs and weights of products; a subclass may compute its weight from unrounded parameters.
        choices = [(True, True), (True, False)] if low else [(False, False)]
        for inputs, weights in choices:
            rounded = tuple(self._rounded(a) if inputs else a for a in args)
            with _parameters(layer, self._rounded if weights else None):
                reference = _flat(force_fp32(layer)(*self._arguments(layer, rounded), **kwargs))
                largest = float(reference.abs().max())
                if not largest <= torch.finfo(self.dtype).max:
                    return 0.0
                error = min(error, relative_error(low_output, reference))
                if limit < error < math.inf and reference.device.type != "mps":
                    # Allow differences up to the rounding error of float32 itself, e.g. after cancellation.
                    exact = _flat(_in_float64(layer, rounded, kwargs), torch.float64)
                    noise = float(torch.linalg.vector_norm(reference - exact))
                    # Subnormal outputs: allow the spacing of the smallest numbers for each element.
                    tiny = torch.finfo(self.dtype).smallest_normal * 2 * torch.finfo(self.dtype).eps
                    tolerance = 8 * noise + tiny * math.sqrt(reference.numel())
                    difference = float(torch.linalg.vector_norm(low_output - exact))
                    size = float(torch.linalg.vector_norm(exact))
                    if difference <= limit * size + tolerance:
                        return 0.0
            if error <= limit:
                break
        return error

    def _rounded(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype).float() if is_float else value


def _same(first: Any, second: Any) -> bool:
    """Return True if two results are equal, with NaN equal to NaN."""
    pairs = list(zip(tensors_in(first), tensors_in(second), strict=False))
    return all(
        a.shape == b.shape and (torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in pairs
    )


@runtime_checkable
class InPlaceLayer(Protocol):
    """Layer that overwrites its input, if its attribute is True."""

    inplace: bool


def _overwrites(layer: nn.Module) -> bool:
    return isinstance(layer, InPlaceLayer) and layer.inplace


def _rounds_once(layer: nn.Module) -> bool:
    """Return True for PyTorch layers that round once, and for subclasses of convolution and linear layers."""
    package, _, module = type(layer).__module__.rpartition(".")
    known = package == "torch.nn.modules" and module in _ROUND_ONCE and not isinstance(layer, _ROUND_MORE)
    return isinstance(layer, _PRODUCTS) or known


def _draws(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return True if random numbers were drawn between two random states. A float32 call would draw other numbers."""
    return any(not torch.equal(before[key], after[key]) for key in ("torch", "cuda", "mps") if key in before)


@contextmanager
def _parameters(layer: nn.Module, function: Callable[[Any], Any] | None) -> Iterator[None]:
    """Replace each parameter p of a layer with ``function(p)`` inside the context, unless ``function`` is None."""
    original = dict(layer._parameters)
    try:
        if function is not None:
            for name, parameter in original.items():
                if parameter is not None:
                    layer._parameters[name] = nn.Parameter(function(parameter.detach()), requires_grad=False)
        yield
    finally:
        layer._parameters.update(original)


def _in_float64(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a layer in float64, with its parameters and buffers in float64."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    buffers = dict(layer._buffers)
    with _parameters(layer, double):
        try:
            layer._buffers.update({name: double(buffer) for name, buffer in buffers.items()})
            return force_fp32(layer)(*(double(a) for a in args), **kwargs)
        finally:
            layer._buffers.update(buffers)
