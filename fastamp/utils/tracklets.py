"""Grouping of images by tracklet."""

import numpy as np

from fastamp.utils.missing import is_missing


def number_tracklets(tracklets: np.ndarray) -> np.ndarray:
    """Number the tracklets from 0 in order of first appearance.

    Args:
        tracklets: (N,) int64 tracklet of each image; ``MISSING`` for an image without a tracklet, which is a tracklet
            of one frame.

    Returns:
        (N,) int64 tracklet numbers.
    """
    if not len(tracklets):
        return tracklets.astype(np.int64)
    missing = is_missing(tracklets)
    new_numbers = tracklets.max() + 1 + np.arange(len(tracklets))
    _, first, inverse = np.unique(np.where(missing, new_numbers, tracklets), return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse.reshape(-1)]


def frames_by_tracklet(tracklets: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each tracklet in ascending order, in order of first appearance.

    Args:
        tracklets: see ``number_tracklets``.
    """
    numbers = number_tracklets(tracklets)
    return np.split(numbers.argsort(kind="stable"), np.cumsum(np.bincount(numbers))[:-1]) if len(numbers) else []
