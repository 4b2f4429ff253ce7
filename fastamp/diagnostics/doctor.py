"""Measurements of a model under each precision: layer by layer, gradients, loss scale, speed, and what to force."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.amp.fp32 import apply_force_fp32
from fastamp.amp.policy import PrecisionPolicy
from fastamp.diagnostics.layer_check import (
    LayerError,
    check_layers,
    cloned,
    embedding_cosine,
    hooked,
    leaf_layers,
    relative_error,
)
from fastamp.diagnostics.locate import (
    Location,
    all_finite,
    largest_finite_scale,
    locate,
    locate_in_evaluation,
    magnitude,
    tensors_in,
)
from fastamp.diagnostics.rehearsal import Rehearsal
from fastamp.utils.errors import TrainingError

LOWEST_COSINE = 0.99
"""A trained model whose mean embedding cosine to float32 is below this gets more layers forced to float32."""

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
    rehearsal: Rehearsal, policy: PrecisionPolicy, *, lost: dict[str, tuple[int, int]] | None = None
) -> list[LayerReport]:
    """Return a report of each layer (module without modules in it), in the order in which they are called.

    Args:
        rehearsal: model and batch.
        policy: the low precision.
        lost: what ``lost_gradients`` returned, for the layers' ``zero_gradients``.
    """
    rehearsal.first_statistics()
    reference = _Outputs(rehearsal.model, beside=policy)
    with reference.watching():
        rehearsal.evaluate(policy.in_float32())
    low = _Outputs(rehearsal.model)
    with low.watching():
        rehearsal.evaluate(policy)
    zeros = {name: count / max(1, total) for name, (count, total) in (lost or {}).items()}
    modules = dict(rehearsal.model.named_modules())
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


def lost_gradients(rehearsal: Rehearsal, policy: PrecisionPolicy, *, scale: float = 1.0) -> dict[str, tuple[int, int]]:
    """Return module name -> (gradient elements of its parameters that only the low precision has as 0, all of them)."""
    reference = rehearsal.train(policy.in_float32()).gradients
    low = rehearsal.train(policy, scale=scale).gradients
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


@contextmanager
def forced(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Have these modules be float32 regions inside, as ``SOLVER.AMP.FORCE_FP32`` makes them."""
    classes = [(module, type(module)) for module in model.modules()]
    patched = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    try:
        apply_force_fp32(model, list(names))
        yield
    finally:
        for module, module_class in classes:
            module.__class__ = module_class
        for module, forward in patched:
            module.forward = forward


@dataclass(frozen=True)
class Soundness:
    """Whether a precision holds the model on one batch.

    Attributes:
        location: where it fails; None when losses, gradients (at some loss scale) and features are finite.
        cosine: mean embedding cosine to float32; None where it fails, or features are no (B, D) tensor.
        near: whether that is near enough; always for an untrained model, see ``Rehearsal.untrained``.
        layers: those that differ from themselves, or from float32 by more than rounding explains.
    """

    location: Location | None
    cosine: float | None = None
    near: bool = True
    layers: tuple[LayerError, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether nothing overflows."""
        return self.location is None

    @property
    def sound(self) -> bool:
        """Whether it is finite, and near enough to float32."""
        return self.finite and self.near and not self.layers

    def describe(self) -> str:
        """Return what does not hold."""
        if self.location:
            return self.location.describe()
        return self.layers[0].describe() if self.layers else f"embedding cosine {self.cosine:.3f}"


def check_soundness(
    rehearsal: Rehearsal, policy: PrecisionPolicy, eval_policy: PrecisionPolicy, *, features: Any
) -> Soundness:
    """Try training, at loss scale 1, and evaluation.

    Args:
        rehearsal: model and batch; sound in float32.
        policy, eval_policy: the low precision of training, and the precision of evaluation.
        features: what the model returns in evaluation in float32.

    Raises:
        TrainingError: nothing computes in low precision.
    """
    if not rehearsal.train(policy, checked=True).finite:
        return Soundness(locate(rehearsal, policy))
    wrong, low = check_layers(rehearsal, policy)
    if eval_policy.dtype != policy.dtype:
        low = rehearsal.evaluate(eval_policy)
    if not all_finite(low):
        return Soundness(locate_in_evaluation(rehearsal, eval_policy), layers=tuple(wrong))
    if not isinstance(low, torch.Tensor) or low.dim() != 2:
        return Soundness(None, layers=tuple(wrong))
    cosine = float(embedding_cosine(low, features).mean())
    return Soundness(None, cosine, near=cosine >= LOWEST_COSINE or rehearsal.untrained, layers=tuple(wrong))


def search_force_fp32(
    rehearsal: Rehearsal,
    policy: PrecisionPolicy,
    eval_policy: PrecisionPolicy,
    *,
    features: Any,
    state: Soundness,
    report: Callable[[str], None] = lambda text: None,
) -> list[str] | None:
    """Find a short list of modules that make the model sound under ``policy`` when they compute in float32.

    First what overflows, one module after the other as the locator names them; then, while the embeddings are too far
    from float32's, the layers whose own error is largest; at last each is taken out again that is not needed.

    Args:
        rehearsal, policy, eval_policy, features: as for ``check_soundness``.
        state: what that returned.
        report: is told what was found, as it goes on.

    Returns:
        The names; empty when none is needed; None when more than half of the layers would be.
    """
    model = rehearsal.model
    layers = _call_order(rehearsal, policy.in_float32())
    chosen: list[str] = []

    def judge(names: Sequence[str]) -> Soundness | None:
        with forced(model, names):
            try:
                return check_soundness(rehearsal, policy, eval_policy, features=features)
            except TrainingError:  # nothing is left that computes in low precision
                return None

    while state is not None and not state.finite:
        new = _next_to_force(state.location, layers, chosen)
        if not new or len(chosen) > max(8, len(layers) // 2):
            return None
        chosen += new
        report(f"{state.location.kind} in {state.location.name}: forcing {', '.join(new)}")
        state = judge(chosen)
    if state is None:
        return None
    if not state.sound:
        worst = sorted(measure_layers(rehearsal, policy), key=lambda layer: -layer.own_error)
        candidates = [layer.name for layer in worst if layer.own_error > 0 and layer.name not in chosen]
        count = 1
        while not state.sound:
            if count > max(8, len(layers)) or count > 2 * len(candidates):
                return None
            report(f"{state.describe().splitlines()[0]}; forcing the {count} layers with the largest errors")
            taken, count = candidates[:count], 2 * count
            state = judge(chosen + taken)
            if state is None or not state.finite:
                return None
        chosen += taken
    for name in list(chosen):
        fewer = [each for each in chosen if each != name]
        fewer_state = judge(fewer)
        if fewer_state is not None and fewer_state.sound:
            report(f"{name} need not be forced")
            chosen = fewer
    return chosen


def _next_to_force(location: Location, layers: list[str], chosen: list[str]) -> list[str]:
    """Return the modules to force next, by where the first value that is not finite was made."""
    module, neighbours = location.module, [name for name in dict.fromkeys(location.neighbours) if name]
    if module and module not in chosen and not location.part.startswith("between"):
        return [module]
    # A function between two layers has no name; it computes in float32 when its input is float32.
    if new := [name for name in neighbours if name not in chosen]:
        return new
    if module and module not in chosen:
        return [module]
    # Forced already, and still too large at its border: its neighbours.
    places = [layers.index(name) for name in [module, *neighbours] if name in layers]
    beside = [place + step for place in places for step in (-1, 1)]
    return [layers[place] for place in beside if 0 <= place < len(layers) and layers[place] not in chosen][:1]


def _call_order(rehearsal: Rehearsal, policy: PrecisionPolicy) -> list[str]:
    """Return the names of the layers that have outputs, in the order of their first call in training."""
    outputs = _Outputs(rehearsal.model)
    with outputs.watching():
        rehearsal.train(policy)
    return list(outputs.samples)


def safe_loss_scale(rehearsal: Rehearsal, policy: PrecisionPolicy, *, up_to: float) -> float | None:
    """Return the largest power of two up to ``up_to`` whose gradients are finite; None without loss scaling."""
    return largest_finite_scale(rehearsal, policy, up_to) if policy.needs_loss_scaling else None


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


def measure_cost(rehearsal: Rehearsal, policy: PrecisionPolicy) -> Cost:
    """Return the cost of a training pass over the batch, beside float32's, which takes turns with it."""
    memory = _memory(rehearsal, policy)
    times = [(_seconds(rehearsal, policy.in_float32()), _seconds(rehearsal, policy)) for _ in range(3)]
    return Cost(
        seconds=statistics.median(low for _, low in times),
        relative=statistics.median(low / reference for reference, low in times),
        memory=memory,
    )


def _seconds(rehearsal: Rehearsal, policy: PrecisionPolicy) -> float:
    start = time.perf_counter()
    rehearsal.train(policy)  # reads its losses on the host, so that the device is done
    return time.perf_counter() - start


def _memory(rehearsal: Rehearsal, policy: PrecisionPolicy) -> float:
    """Return ``Cost.memory`` of a pass, which also warms up."""
    device = next(rehearsal.model.parameters()).device
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rehearsal.train(policy)
    bytes_used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sum(kept.values())
    return bytes_used / 2**20
