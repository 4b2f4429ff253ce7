"""Tensors nested in what modules take and return: finiteness, magnitude, distance to a reference."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


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


def cloned(args: Any) -> Any:
    """Return the arguments of a call with copies of its tensors: layers that work in place write over them."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def relative_error(value: torch.Tensor | None, reference: torch.Tensor) -> float:
    """Return the L2 norm of the difference over that of the reference; infinity where one of them is not finite."""
    if value is None or value.shape != reference.shape:
        return math.inf
    norm, difference = (float(torch.linalg.vector_norm(each)) for each in (reference, value - reference))
    if not math.isfinite(difference) and value.dtype == torch.float32 and value.device.type != "mps":
        return relative_error(value.double(), reference.double())  # squares beyond 1e38
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else math.inf if difference else 0.0


def embedding_cosine(low: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarity of each embedding to its reference: (B,), -1 to 1.

    It is 1 where both are all zero: the model has collapsed, which no precision changes.

    Args:
        low, reference: (B, D), of the same images in two precisions.
    """
    both_zero = ~(low.any(dim=1) | reference.any(dim=1))
    return F.cosine_similarity(low, reference, dim=1).masked_fill(both_zero, 1)
