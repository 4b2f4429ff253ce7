"""Measurements of a model in a precision: layer by layer, gradients, loss scale, speed and memory."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
"""Elements of a layer's output that errors are computed from; magnitudes are of all."""


@dataclass(frozen=True)
class LayerReport:
    """One layer in one precision, on one batch in evaluation mode.

    Attributes:
        name, kind: the module's name and class.
        error: relative L2 error of its output to float32's, with the inputs that it has under the policy: what the
            layers before it did included.
        own_error: the same with float32's inputs: what the layer alone does.
        magnitude: largest magnitude of its output in float32.
        limit_share: that over the largest number of the policy's dtype; above 1 it overflows.
        zero_gradients: share of its parameters' gradient elements that are 0 in this precision and not in float32;
            None without parameters that are trained, or where it was not measured.
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
    """Return a report of each layer (module without modules in it), in the order in which they are called.

    Args:
        passes: model and batch.
        policy: the low precision.
        lost: what ``lost_gradients`` returned, for the layers' ``zero_gradients``.
    """
    passes.initial_statistics()
    reference = _Outputs(passes.model, beside=policy)
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
    """Return module name -> (gradient elements of its parameters that only the low precision has as 0, all of them)."""
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
    """Return evenly spread elements of the floating-point tensors in ``output``, as float32."""
    parts = [t.detach().float().reshape(-1) for t in tensors_in(output)]
    whole = torch.cat(parts) if parts else torch.empty(0)
    return whole[:: max(1, whole.numel() // _SAMPLE)].clone()


class _Outputs:
    """Watches what each layer returns during one pass.

    Args:
        model: the model.
        beside: also run each layer a second time under this policy, on the inputs that it has.
    """

    def __init__(self, model: nn.Module, beside: PrecisionPolicy | None = None) -> None:
        self.model = model
        self.layers = leaf_layers(model)
        self.beside = beside
        self.samples: dict[str, torch.Tensor] = {}
        self.magnitudes: dict[str, float] = {}
        self.own_errors: dict[str, float] = {}
        self._inputs: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the hooks in place inside."""
        enter = self._enter if self.beside else None
        with hooked(self.model, self.layers, enter=enter, leave=self._leave):
            yield

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = cloned(args)

    def _leave(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name, sample = self.layers[layer], _sample(output)
        if not sample.numel():
            return
        own_error = 0.0
        if self.beside:
            with self.beside.autocast():
                own_error = relative_error(_sample(type(layer).forward(layer, *self._inputs, **kwargs)), sample)
        self.samples[name] = sample
        self.magnitudes[name] = max(self.magnitudes.get(name, 0.0), magnitude(output))
        self.own_errors[name] = max(self.own_errors.get(name, 0.0), own_error)


def call_order(passes: IsolatedPasses, policy: PrecisionPolicy) -> list[str]:
    """Return the names of the layers that have outputs, in the order of their first call in training."""
    outputs = _Outputs(passes.model)
    with outputs.watching():
        passes.train(policy)
    return list(outputs.samples)


def safe_loss_scale(passes: IsolatedPasses, policy: PrecisionPolicy, *, up_to: float) -> float | None:
    """Return the largest power of two up to ``up_to`` whose gradients are finite; None without loss scaling."""
    return largest_finite_scale(passes, policy, up_to) if policy.needs_loss_scaling else None


@dataclass(frozen=True)
class Cost:
    """What a training pass takes in one precision.

    Attributes:
        seconds: of a forward and a backward pass, median of three.
        relative: to float32, the median ratio of passes that took turns.
        memory: MiB; on CUDA the peak of what tensors took, elsewhere what is kept from forward to backward.
    """

    seconds: float
    relative: float
    memory: float


def measure_cost(passes: IsolatedPasses, policy: PrecisionPolicy) -> Cost:
    """Return the cost of a training pass over the batch, beside float32's, which takes turns with it."""
    memory = _memory(passes, policy)
    times = [(_seconds(passes, policy.in_float32()), _seconds(passes, policy)) for _ in range(3)]
    return Cost(
        seconds=statistics.median(low for _, low in times),
        relative=statistics.median(low / reference for reference, low in times),
        memory=memory,
    )


def _seconds(passes: IsolatedPasses, policy: PrecisionPolicy) -> float:
    start = time.perf_counter()
    passes.train(policy)  # reads its losses on the host, so that the device is done
    return time.perf_counter() - start


def _memory(passes: IsolatedPasses, policy: PrecisionPolicy) -> float:
    """Return ``Cost.memory`` of a pass, which also warms up."""
    device = next(passes.model.parameters()).device
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        passes.train(policy)
    bytes_used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sum(kept.values())
    return bytes_used / 2**20
