"""Functions for tensors in nested structures: finiteness, magnitude and distance to a reference."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


def all_finite(value: Any) -> bool:
    """Return True if all floating-point tensors in a nested structure are finite; synchronizes with the device."""
    return all(bool(torch.isfinite(t).all()) for t in tensors_in(value))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the non-empty floating-point tensors in nested lists, tuples and dicts."""
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
    """Return the largest finite absolute value in a nested structure; 0 if there is none."""
    largest = 0.0
    for tensor in tensors_in(value):
        sizes = tensor.detach().abs().float()
        largest = max(largest, float(torch.where(torch.isfinite(sizes), sizes, 0.0).max()))
    return largest


def cloned(args: Any) -> Any:
    """Copy the tensors among the arguments of a call, because in-place layers overwrite them."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def relative_error(value: torch.Tensor | None, reference: torch.Tensor) -> float:
    """Compute the L2 norm of the difference divided by that of the reference; infinity if a value is not finite."""
    if value is None or value.shape != reference.shape:
        return math.inf
    norm, difference = (float(torch.linalg.vector_norm(tensor)) for tensor in (reference, value - reference))
    if not math.isfinite(difference) and value.dtype == torch.float32 and value.device.type != "mps":
        return relative_error(value.double(), reference.double())  # squares overflow float32
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else math.inf if difference else 0.0


def embedding_cosine(low: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Compute the cosine similarity between each embedding and its reference.

    The similarity is 1 if both embeddings are all zero, because a collapsed model outputs zeros in every precision.

    Args:
        low, reference: (B, D), embeddings of the same images in two precisions.

    Returns:
        (B,), -1..1.
    """
    both_zero = ~(low.any(dim=1) | reference.any(dim=1))
    return F.cosine_similarity(low, reference, dim=1).masked_fill(both_zero, 1)
