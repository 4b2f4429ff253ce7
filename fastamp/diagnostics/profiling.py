"""Profile of a model in one precision: layer errors, gradient underflow, loss scale, speed and memory."""

import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.amp.policy import PrecisionPolicy
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.layer_hooks import hooked, leaf_layers
from fastamp.diagnostics.nan_locator import largest_finite_scale
from fastamp.diagnostics.tensors import cloned, magnitude, relative_error, tensors_in

_SAMPLE = 65536
"""Number of output elements per layer from which errors are computed; magnitudes are computed from all elements."""


@dataclass(frozen=True)
class LayerReport:
    """One layer in one precision, on one batch in evaluation mode.

    Attributes:
        name, kind: name and class of the module.
        error: relative L2 error of the output compared with float32, in a pass under the policy. It includes the errors
            of all layers before this one.
        own_error: relative L2 error of the output if the input is taken from the float32 pass: the error that only this
            layer causes.
        magnitude: largest absolute value of the output in float32.
        limit_share: ``magnitude`` divided by the largest number of the low precision; above 1 the layer overflows.
        zero_gradients: fraction of the gradient elements of the layer's parameters that are 0 in this precision but not
            in float32, 0..1; None without trainable parameters, or if not measured.
    """

    name: str
    kind: str
    error: float
    own_error: float
    magnitude: float
    limit_share: float
    zero_gradients: float | None


def measure_layers(
    passes: IsolatedPasses, policy: PrecisionPolicy, *, lost: dict[str, tuple[int, int]] | None = None
) -> list[LayerReport]:
    """Measure the errors and the output magnitude of each layer (module without submodules), in call order.

    Args:
        passes: passes of a model over a batch.
        policy: the low precision.
        lost: return value of ``lost_gradients``, for ``LayerReport.zero_gradients``.
    """
    passes.initial_statistics()
    reference = _Outputs(passes.model, second_policy=policy)
    with reference.watching():
        passes.evaluate(policy.in_float32())
    low = _Outputs(passes.model)
    with low.watching():
        passes.evaluate(policy)
    zeros = {name: count / max(1, total) for name, (count, total) in (lost or {}).items()}
    modules = dict(passes.model.named_modules())
    limit = torch.finfo(policy.dtype).max
    return [
        LayerReport(
            name=name,
            kind=type(modules[name]).__name__,
            error=relative_error(low.samples.get(name), sample),
            own_error=reference.own_errors[name],
            magnitude=reference.magnitudes[name],
            limit_share=reference.magnitudes[name] / limit,
            zero_gradients=zeros.get(name),
        )
        for name, sample in reference.samples.items()
    ]


def lost_gradients(
    passes: IsolatedPasses, policy: PrecisionPolicy, *, scale: float = 1.0
) -> dict[str, tuple[int, int]]:
    """Count the gradient elements that are zero only in low precision: module name -> ``(lost, total)``."""
    reference = passes.train(policy.in_float32()).gradients
    low = passes.train(policy, scale=scale).gradients
    counts: dict[str, tuple[int, int]] = {}
    for name, gradient in reference.items():
        if name in low:
            module = name.rpartition(".")[0]
            lost, total = counts.get(module, (0, 0))
            counts[module] = (lost + int(((gradient != 0) & (low[name] == 0)).sum()), total + gradient.numel())
    return counts


def _sample(output: Any) -> torch.Tensor:
    """Return evenly spaced elements of the floating-point tensors in ``output``, as one float32 tensor."""
    parts = [t.detach().float().reshape(-1) for t in tensors_in(output)]
    flat = torch.cat(parts) if parts else torch.empty(0)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()


class _Outputs:
    """Hooks that record the output of each layer during one pass.

    Args:
        model: the model.
        second_policy: also run each layer under this policy on the same input. Default None.
    """

    def __init__(self, model: nn.Module, second_policy: PrecisionPolicy | None = None) -> None:
        self.model = model
        self.layers = leaf_layers(model)
        self.second_policy = second_policy
        self.samples: dict[str, torch.Tensor] = {}
        self.magnitudes: dict[str, float] = {}
        self.own_errors: dict[str, float] = {}
        self._inputs: Any = None

    def watching(self) -> AbstractContextManager[None]:
        """Register the hooks for the duration of the context."""
        enter = self._enter if self.second_policy else None
        return hooked(self.model, self.layers, enter=enter, leave=self._leave)

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = cloned(args)

    def _leave(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, sample = self.layers[layer], _sample(output)
        if not sample.numel():
            return
        own_error = 0.0
        if self.second_policy:
            with self.second_policy.autocast():
                own_error = relative_error(_sample(type(layer).forward(layer, *self._inputs, **kwargs)), sample)
        self.samples[name] = sample
        self.magnitudes[name] = max(self.magnitudes.get(name, 0.0), magnitude(output))
        self.own_errors[name] = max(self.own_errors.get(name, 0.0), own_error)


def call_order(passes: IsolatedPasses, policy: PrecisionPolicy) -> list[str]:
    """List the layers with floating-point outputs in the order of their first call in training."""
    outputs = _Outputs(passes.model)
    with outputs.watching():
        passes.train(policy)
    return list(outputs.samples)


def safe_loss_scale(passes: IsolatedPasses, policy: PrecisionPolicy, *, up_to: float) -> float | None:
    """Find the largest power of two, at most ``up_to``, with finite gradients; None without loss scaling."""
    return largest_finite_scale(passes, policy, up_to) if policy.needs_loss_scaling else None


@dataclass(frozen=True)
class Cost:
    """Time and memory of a training pass in one precision.

    Attributes:
        seconds: time of a forward and a backward pass, the median of three measurements.
        relative: time divided by the time in float32, the median over alternating passes.
        memory: MiB; on CUDA the peak allocated memory, on other devices the tensors saved for the backward pass.
    """

    seconds: float
    relative: float
    memory: float


def measure_cost(passes: IsolatedPasses, policy: PrecisionPolicy) -> Cost:
    """Measure time and memory of a training pass, alternating with passes in float32 for ``Cost.relative``."""
    memory = _memory(passes, policy)
    times = [(_seconds(passes, policy.in_float32()), _seconds(passes, policy)) for _ in range(3)]
    return Cost(
        seconds=statistics.median(low for _, low in times),
        relative=statistics.median(low / reference for reference, low in times),
        memory=memory,
    )


def _seconds(passes: IsolatedPasses, policy: PrecisionPolicy) -> float:
    start = time.perf_counter()
    passes.train(policy)  # synchronizes, because it copies the losses to the host
    return time.perf_counter() - start


def _memory(passes: IsolatedPasses, policy: PrecisionPolicy) -> float:
    """Measure ``Cost.memory``; this pass is also the warm-up."""
    device = next(passes.model.parameters()).device
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        passes.train(policy)
    bytes_used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sum(saved.values())
    return bytes_used / 2**20
