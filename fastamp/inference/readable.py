"""Computation on those images of a batch that can be read."""

from collections.abc import Callable
from typing import TypeVar

from fastamp.utils.errors import DataError

K = TypeVar("K")
V = TypeVar("V")


def compute_readable(images: list[K], compute: Callable[[list[K]], V]) -> tuple[list[tuple[list[K], V]], list[str]]:
    """Compute a value of the images of a batch at once, or one by one if one of them cannot be read.

    Args:
        images: images of the batch.
        compute: function: images -> value; raises DataError for an image that cannot be read.

    Returns:
        ``([(images, value), ...], faults)``: the images that can be read with their values, and the errors of others.
    """
    try:
        return [(images, compute(images))], []
    except DataError as error:
        if len(images) == 1:
            return [], [str(error)]
    parts = [compute_readable([image], compute) for image in images]
    return [part for computed, _ in parts for part in computed], [fault for _, faults in parts for fault in faults]
