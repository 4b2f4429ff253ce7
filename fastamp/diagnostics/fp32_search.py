"""Search for modules that must compute in float32 for a low precision to pass the precision check."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fastamp.amp.device_errors import is_out_of_memory
from fastamp.amp.fp32 import apply_force_fp32
from fastamp.amp.policy import PrecisionPolicy
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.precision_check import PrecisionCheck
from fastamp.diagnostics.profiling import call_order, measure_layers
from fastamp.utils.errors import TrainingError


@contextmanager
def forced(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make modules compute in float32 inside the context, like ``SOLVER.AMP.FORCE_FP32``."""
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


def search_force_fp32(
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    *,
    check: Callable[[], PrecisionCheck],
    current: PrecisionCheck,
    report: Callable[[str], None] = lambda text: None,
) -> list[str] | None:
    """Find a short list of modules that must compute in float32 for the model to pass the precision check.

    First, modules that overflow are added one location at a time, until the model no longer overflows. Then, if the
    embeddings still differ from float32, the layers with the largest errors are added. Finally, modules that are not
    needed are removed.

    Args:
        model: model in training mode.
        batch: batch of the checks.
        policy: the low precision.
        check: function that runs ``check_precision`` on the current model.
        current: result of ``check`` without forced modules.
        report: function that logs a progress message.

    Returns:
        Names of the modules; empty if none is needed; None if more than half of the layers would be needed.

    Raises:
        TrainingError: if memory runs out.
    """
    with IsolatedPasses(model, batch) as passes:
        layers = call_order(passes, policy.in_float32())
    chosen: list[str] = []

    def check_with(names: Sequence[str]) -> PrecisionCheck | None:
        with forced(model, names):
            try:
                return check()
            except TrainingError as error:  # no operation in low precision is left
                if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                    raise
                return None

    state: PrecisionCheck | None = current
    while state is not None and state.overflow:
        location = state.location
        new = _next_to_force(location, layers, chosen) if location else []
        if not location or not new or len(chosen) > max(8, len(layers) // 2):
            return None
        chosen += new
        report(f"{location.kind} in {location.name}: forcing {', '.join(new)} to float32")
        state = check_with(chosen)
    if state is None:
        return None
    if state.problem:
        with IsolatedPasses(model, batch) as passes:
            worst = sorted(measure_layers(passes, policy), key=lambda layer: -layer.own_error)
        candidates = [layer.name for layer in worst if layer.own_error > 0 and layer.name not in chosen]
        count = 1
        while state.problem:
            if count > max(8, len(layers)) or count > 2 * len(candidates):
                return None
            headline = state.problem.splitlines()[0].rstrip(".")
            report(f"{headline}; forcing the {count} layers with the largest errors to float32")
            taken, count = candidates[:count], 2 * count
            state = check_with(chosen + taken)
            if state is None or state.overflow:
                return None
        chosen += taken
    for name in list(chosen):
        fewer = [module_name for module_name in chosen if module_name != name]
        fewer_state = check_with(fewer)
        if fewer_state is not None and not fewer_state.problem:
            report(f"{name} does not need float32")
            chosen = fewer
    return chosen


def _next_to_force(location: NonFiniteLocation, layers: list[str], chosen: list[str]) -> list[str]:
    """Select the modules to force next, given the location of the first non-finite value."""
    module, adjacent = location.module, [name for name in dict.fromkeys(location.adjacent) if name]
    if module and module not in chosen and not location.part.startswith("between"):
        return [module]
    # A function between two layers has no name; it computes in float32 if its input is float32.
    if new := [name for name in adjacent if name not in chosen]:
        return new
    if module and module not in chosen:
        return [module]
    # All are forced and the value still overflows: try the layers before and after.
    positions = [layers.index(name) for name in [module, *adjacent] if name in layers]
    candidates = [position + step for position in positions for step in (-1, 1)]
    return [layers[n] for n in candidates if 0 <= n < len(layers) and layers[n] not in chosen][:1]
