"""Boxes of persons or objects in images: the rule at the border, and boxes that are not in pixels.

Every use of a box follows one rule: it is rounded to whole pixels and clipped to the image. A box of which no pixel
remains is outside the image.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

Box = tuple[int, int, int, int]

SMALLEST_SIDE = 8
"""Boxes with a shorter side, in pixels, cause a warning."""


def clip_box(box: Sequence[float], width: int, height: int) -> Box | None:
    """Round a box to whole pixels and clip it to an image.

    Args:
        box: left, top, right and bottom in pixels; right and bottom are exclusive.
        width, height: size of the image in pixels.

    Returns:
        Left, top, right and bottom in 0..width and 0..height, of at least one pixel; None if the box is outside the
        image, has no area, or contains NaN.
    """
    left, top, right, bottom = box
    if not (left < right and top < bottom):
        return None
    left, right = round(min(max(left, 0), width)), round(min(max(right, 0), width))
    top, bottom = round(min(max(top, 0), height)), round(min(max(bottom, 0), height))
    return (left, top, right, bottom) if left < right and top < bottom else None


def are_normalized(boxes: np.ndarray) -> bool:
    """Return True if boxes (N, 4), of corners or of sizes, are fractions of the image instead of pixels.

    No coordinate is beyond -1..1, and at least one is not 0.
    """
    largest = np.abs(boxes).max(initial=0)
    return bool(0 < largest <= 1)


def warn_of_small_boxes(boxes: np.ndarray, place: str, name_of: Callable[[int], str] | None = None) -> None:
    """Log a warning about boxes with a side of 1 to ``SMALLEST_SIDE - 1`` pixels.

    Args:
        boxes: (N, 4) left, top, right and bottom.
        place: file or argument, for the message.
        name_of: function from the row of a box to its name. Default: None, its coordinates.
    """
    with np.errstate(invalid="ignore"):  # infinite coordinates
        sides = np.rint(boxes[:, 2:]) - np.rint(boxes[:, :2])
    small = np.flatnonzero((sides > 0).all(axis=1) & (sides < SMALLEST_SIDE).any(axis=1))
    if len(small):
        row = int(small[0])
        first = name_of(row) if name_of else " ".join(f"{value:g}" for value in boxes[row])
        logger.warning(
            "%s: %d of %d boxes have a side of less than %d pixels; the first: %s\n"
            "  fix: check that the boxes are in pixels of the image",
            *(place, len(small), len(boxes), SMALLEST_SIDE, first),
        )


def normalized_error(place: str) -> DataError:
    """Return the error for boxes that are fractions of the image; ``place`` is the file or the argument."""
    return DataError(
        f"{place}: the boxes are normalized, between 0 and 1; expected pixels.\n"
        "  fix: multiply the horizontal coordinates by the width of the image and the vertical ones by its height; "
        "boxes of YOLO also begin with their center instead of their left and top side"
    )
