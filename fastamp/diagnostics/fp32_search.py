"""Search for the modules that must compute in float32 so that a low precision holds the model."""

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


def search_force_fp32(
    model: nn.Module,
    batch: dict[str, Any],
    policy: PrecisionPolicy,
    *,
    check: Callable[[], PrecisionCheck],
    found: PrecisionCheck,
    report: Callable[[str], None] = lambda text: None,
) -> list[str] | None:
    """Find a short list of modules that make a precision hold the model when they compute in float32.

    First what overflows, one module after the other as the locator names them; then, while the embeddings are too far
    from float32's, the layers whose own error is largest; at last each is taken out again that is not needed.

    Args:
        model: in training mode.
        batch: that of the checks.
        policy: the low precision.
        check: checks the precision of the model as it is, by ``check_precision``.
        found: what it found before anything was forced.
        report: is told what was found, as it goes on.

    Returns:
        The names; empty when none is needed; None when more than half of the layers would be.

    Raises:
        TrainingError: memory ran out.
    """
    with IsolatedPasses(model, batch) as passes:
        layers = call_order(passes, policy.in_float32())
    chosen: list[str] = []

    def check_with(names: Sequence[str]) -> PrecisionCheck | None:
        with forced(model, names):
            try:
                return check()
            except TrainingError as error:  # nothing is left that computes in low precision
                if error.__cause__ is not None and is_out_of_memory(error.__cause__):
                    raise
                return None

    state: PrecisionCheck | None = found
    while state is not None and state.overflow:
        new = _next_to_force(state.location, layers, chosen) if state.location else []
        if not new or len(chosen) > max(8, len(layers) // 2):
            return None
        chosen += new
        report(f"{state.location.kind} in {state.location.name}: forcing {', '.join(new)}")
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
            report(f"{headline}; forcing the {count} layers with the largest errors")
            taken, count = candidates[:count], 2 * count
            state = check_with(chosen + taken)
            if state is None or state.overflow:
                return None
        chosen += taken
    for name in list(chosen):
        fewer = [each for each in chosen if each != name]
        fewer_state = check_with(fewer)
        if fewer_state is not None and not fewer_state.problem:
            report(f"{name} need not be forced")
            chosen = fewer
    return chosen


def _next_to_force(location: NonFiniteLocation, layers: list[str], chosen: list[str]) -> list[str]:
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
