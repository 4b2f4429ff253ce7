"""Features of tracklets: average or maximum over their frames."""

from collections.abc import Collection

import torch

from fastamp.config import Key
from fastamp.utils.tracklets import number_tracklets

KEYS = (
    Key(
        "TEST.TRACKLET.POOL",
        "avg",
        "Feature of a tracklet, for test sets with the column tracklet: average or maximum over the features of its "
        "frames; none ranks frames.",
        choices=("avg", "max", "none"),
    ),
)

COLUMN = "tracklet"
FRAMES = "frames"
"""Name of the number of frames that a row stands for."""


def pool_tracklets(
    columns: dict[str, torch.Tensor], features: Collection[str], *, num_query: int, pool: str
) -> dict[str, torch.Tensor]:
    """Reduce the rows of each tracklet to one.

    Rows that are already reduced can be reduced again, together with further rows of the same tracklets: the result is
    the same as if all frames had been reduced at once.

    Args:
        columns: name -> (N, ...) values. ``tracklet``: (N,) int64, -1 for an image without a tracklet, which is a
            tracklet of one frame. ``indices``: (N,) int64 positions in the test set. ``frames``: (N,) int64 number of
            frames of each row, if rows are reduced. A tracklet in both the query and the gallery set is two tracklets.
        features: names of the columns to pool, (N, D). Of each other column, the first value of a tracklet is kept.
        num_query: number of query images, at the start of the test set.
        pool: ``"avg"`` or ``"max"``.

    Returns:
        Name -> (T, ...) values of the T tracklets in order of first appearance, and ``frames``.
    """
    in_gallery = (columns["indices"] >= num_query).numpy()
    numbers = torch.from_numpy(number_tracklets(2 * number_tracklets(columns[COLUMN].numpy()) + in_gallery))
    frames = columns.get(FRAMES, torch.ones_like(numbers))
    count = int(numbers.max()) + 1 if len(numbers) else 0
    if count == len(numbers):
        return columns | {FRAMES: frames}
    total = frames.new_zeros(count).index_add_(0, numbers, frames)
    order = numbers.argsort(stable=True)
    counts = torch.bincount(numbers)
    first = order[counts.cumsum(0) - counts]
    reduced = {}
    for name, values in columns.items():
        reduced[name] = values[first]
        if name in features and pool == "max":
            reduced[name].scatter_reduce_(0, numbers[:, None].expand_as(values), values, "amax")
        elif name in features:
            weighted = values * frames[:, None].to(values.dtype)
            summed = torch.zeros_like(reduced[name]).index_add_(0, numbers, weighted)
            reduced[name] = summed / total[:, None].to(values.dtype)
    return reduced | {FRAMES: total}
