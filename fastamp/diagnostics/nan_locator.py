"""NaN locator: the first module with a non-finite value in the forward or backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastamp.amp.device_errors import is_out_of_memory
from fastamp.amp.policy import PrecisionPolicy, dtype_name
from fastamp.diagnostics.isolated_passes import IsolatedPasses, batch_size, slice_batch
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.nan_observer import NonFiniteObserver
from fastamp.diagnostics.tensors import all_finite


def locate_in_training(
    passes: IsolatedPasses, policy: PrecisionPolicy, *, scale: float = 1.0
) -> NonFiniteLocation | None:
    """Locate the first non-finite value in a training step under ``policy``.

    If losses and gradients are finite in float32, intermediate values that are not finite in float32 either, e.g. a
    mask of minus infinity, are ignored.

    Args:
        passes: passes of a model over a batch.
        policy: precision that fails.
        scale: loss scale of the failed step.

    Returns:
        The location; None if losses and gradients are finite.
    """
    reference = _observe_training(passes, policy.in_float32(), 1.0)
    if reference.failed:
        return reference.location("not finite in float32", 1.0)
    if not policy.enabled:
        return None
    low = _observe_training(passes, policy, scale, reference)
    if not low.failed:
        return None
    if low.first is not None and low.first[0] in ("output", "input"):
        return low.location("forward overflow", scale)
    if scale != 1.0:
        unscaled = _observe_training(passes, policy, 1.0, reference)
        if not unscaled.failed:
            safe = largest_finite_scale(passes, policy, scale)
            return low.location("loss-scale overflow", scale, safe_scale=safe)
        low = unscaled
    return low.location("backward overflow", 1.0)


def try_locate(
    model: nn.Module,
    batch: dict[str, Any],
    find: Callable[[IsolatedPasses], NonFiniteLocation | None],
    *,
    random: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
) -> tuple[NonFiniteLocation | None, str]:
    """Locate the first non-finite value; if an exception prevents this, return its text instead of raising it.

    Args:
        model, batch, random, frozen: see ``IsolatedPasses``. The batch is halved until a float32 pass fits into
            memory.
        find: function that calls ``locate_in_training`` or ``locate_in_evaluation`` under a policy.

    Returns:
        ``(location, reason)``: the result of ``find``, or None if ``find`` failed; and the reason for the failure, or
        an empty string.
    """
    count = batch_size(batch)
    while True:
        try:
            with IsolatedPasses(model, slice_batch(batch, count), random=random, frozen=frozen) as passes:
                return find(passes), ""
        except Exception as error:
            if not is_out_of_memory(error) or count < 8:
                reason = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
                return None, f"(the first non-finite value could not be located: {reason})"
        count //= 2


def locate_in_evaluation(passes: IsolatedPasses, policy: PrecisionPolicy) -> NonFiniteLocation | None:
    """Locate the first non-finite value in an evaluation under ``policy``; None if all values are finite."""
    passes.initial_statistics()
    reference = NonFiniteObserver(passes.model, "float32")
    with reference.watching():
        reference.failed = not all_finite(passes.evaluate(policy.in_float32()))
    if reference.failed:
        return reference.location("not finite in float32", 1.0)
    low = NonFiniteObserver(passes.model, dtype_name(policy.dtype), reference)
    with low.watching():
        low.failed = not all_finite(passes.evaluate(policy))
    return low.location("forward overflow", 1.0) if low.failed else None


def describe_evaluation(model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy) -> str:
    """Describe the first non-finite value in an evaluation of ``batch`` and suggest a fix; empty if there is none.

    Args:
        model: model in evaluation mode.
        batch: batch with non-finite features.
        policy: precision of the evaluation.

    Returns:
        The description; if the search fails, the reason for the failure.
    """
    location, note = try_locate(model, batch, lambda passes: locate_in_evaluation(passes, policy))
    if location is None:
        return note
    overflows = location.kind == "forward overflow"
    return location.describe() + "\n  or:    set SOLVER.AMP.EVAL_DTYPE to float32 to evaluate in float32" * overflows


def largest_finite_scale(passes: IsolatedPasses, policy: PrecisionPolicy, start: float) -> float | None:
    """Find the largest loss scale up to ``start`` with finite gradients.

    Returns:
        ``start`` if it gives finite gradients, else the largest smaller power of two that does; None if the gradients
        are not finite at scale 1.
    """

    def finite(scale: float) -> bool:
        return passes.train(policy, scale=scale).finite

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
    """Return the largest integer n with 2**n < ``number``."""
    mantissa, exponent = torch.frexp(torch.tensor(number, dtype=torch.float64))
    return int(exponent) - (2 if mantissa == 0.5 else 1)


def _observe_training(
    passes: IsolatedPasses, policy: PrecisionPolicy, scale: float, reference: "NonFiniteObserver | None" = None
) -> "NonFiniteObserver":
    observer = NonFiniteObserver(passes.model, dtype_name(policy.dtype), reference)
    with observer.watching():
        observer.failed = not passes.train(policy, scale=scale).finite
    return observer
