"""Find the first module that made a value which is not finite, in the forward or in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastamp.amp.device_errors import is_out_of_memory
from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.diagnostics.location import Location
from fastamp.diagnostics.observer import Observer
from fastamp.diagnostics.rehearsal import Rehearsal, batch_size, part_of
from fastamp.diagnostics.tensors import all_finite
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "Key": "fastamp.diagnostics.observer.Key",
        "magnitude": "fastamp.diagnostics.tensors.magnitude",
        "tensors_in": "fastamp.diagnostics.tensors.tensors_in",
    },
)


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
    reference = Observer(rehearsal.model, "float32")
    with reference.watching():
        reference.failed = not all_finite(rehearsal.evaluate(policy.in_float32()))
    if reference.failed:
        return reference.location("not finite in float32", 1.0)
    low = Observer(rehearsal.model, dtype_name(policy.dtype), reference)
    with low.watching():
        low.failed = not all_finite(rehearsal.evaluate(policy))
    return low.location("forward overflow", 1.0) if low.failed else None


def describe_evaluation(model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy) -> str:
    """Describe the first non-finite value in an evaluation of ``batch``, and the fix; empty if all values are finite.

    Args:
        model: in evaluation mode.
        batch: its features are not finite.
        policy: the precision of the evaluation.
    """
    location, note = search(model, batch, lambda rehearsal: locate_in_evaluation(rehearsal, policy))
    if location is None:
        return note
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


def _observe_training(
    rehearsal: Rehearsal, policy: PrecisionPolicy, scale: float, reference: "Observer | None" = None
) -> "Observer":
    observer = Observer(rehearsal.model, dtype_name(policy.dtype), reference)
    with observer.watching():
        observer.failed = not rehearsal.train(policy, scale=scale).finite
    return observer
