"""Metrics of multi-object tracking: identity switches, MOTA and IDF1."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fastamp.tracking.mot_file import Boxes
from fastamp.tracking.tracker import iou
from fastamp.utils.errors import DataError
from fastamp.utils.plural import plural

MIN_IOU = 0.5
"""Smallest IoU of a ground-truth box and a tracked box that match."""


@dataclass(frozen=True)
class TrackingMetrics:
    """Result of ``tracking_metrics``.

    Attributes:
        switches: matches of an identity with another track than at its previous match.
        misses: ground-truth boxes without a match.
        false_positives: tracked boxes without a match.
        boxes: ground-truth boxes.
        mota: 100 (1 - (misses + false positives + switches) / boxes), in percent, at most 100; NaN without boxes.
        idf1: F1 of the boxes with the correct identity, in percent, 0..100; NaN without boxes.
    """

    switches: int
    misses: int
    false_positives: int
    boxes: int
    mota: float
    idf1: float

    def __str__(self) -> str:
        return f"{self.switches} identity switches, MOTA {self.mota:.2f}, IDF1 {self.idf1:.2f}"


def tracking_metrics(truth: Boxes, tracked: Boxes) -> TrackingMetrics:
    """Compute identity switches, MOTA (Bernardin and Stiefelhagen 2008) and IDF1 (Ristani et al. 2016).

    In each frame, an identity keeps the track of its previous match while they overlap; the other boxes are matched
    for the largest number of matches, and then for the largest sum of IoUs. For IDF1 (arXiv:1609.01775), each identity
    is matched with at most one track for the whole sequence. Ground truth with confidence 0 is not counted, but a
    track on it is a false positive.

    Args:
        truth: ground truth.
        tracked: tracks.

    Raises:
        DataError: see ``check_ids``.
    """
    for boxes in (truth, tracked):
        check_ids(boxes)
    truth = truth.select(truth.confidences != 0)
    last: dict[int, int] = {}
    switches = matches = 0
    identities, rows = np.unique(truth.ids, return_inverse=True)
    tracks, columns = np.unique(tracked.ids, return_inverse=True)
    together = np.zeros((len(identities), len(tracks)), dtype=np.int64)
    for frame in np.union1d(truth.frames, tracked.frames).tolist():
        here, there = np.flatnonzero(truth.frames == frame), np.flatnonzero(tracked.frames == frame)
        overlaps = np.array([iou(truth.boxes[row], tracked.boxes[there]) for row in here]).reshape(
            len(here), len(there)
        )
        for row, column in np.argwhere(overlaps >= MIN_IOU).tolist():
            together[rows[here[row]], columns[there[column]]] += 1
        for row, column in _matches(overlaps, truth.ids[here], tracked.ids[there], last):
            identity, track = int(truth.ids[here[row]]), int(tracked.ids[there[column]])
            matches += 1
            switches += last.get(identity, track) != track
            last[identity] = track
    misses, false_positives, count = len(truth) - matches, len(tracked) - matches, len(truth)
    correct = int(together[linear_sum_assignment(together, maximize=True)].sum())
    mota = 100 * (1 - (misses + false_positives + switches) / count) if count else np.nan
    idf1 = 200 * correct / (count + len(tracked)) if count else np.nan
    return TrackingMetrics(switches, misses, false_positives, count, float(mota), float(idf1))


def check_ids(boxes: Boxes) -> None:
    """Check that the counted boxes have an id, once in each frame.

    Raises:
        DataError: if an id is negative, or is twice in a frame; the message names the line.
    """
    counted = boxes.select(boxes.confidences != 0)
    _, first, number = np.unique(
        np.stack([counted.frames, counted.ids], axis=1), axis=0, return_index=True, return_inverse=True
    )
    is_again = first[number.reshape(-1)] != np.arange(len(counted))
    wrong = np.flatnonzero((counted.ids < 0) | is_again)
    if len(wrong):
        row = int(wrong[0])
        place, frame, track_id = f"{boxes.path}, line {counted.lines[row]}", counted.frames[row], counted.ids[row]
        fault = f"{track_id} is not an identity" if track_id < 0 else f"id {track_id} is twice in frame {frame}"
        raise DataError(
            f"{place}: {fault} ({plural(len(wrong), 'such line')}).\n"
            "  fix: give each identity one number from 0 in all frames; confidence 0 excludes a line of a ground truth"
        )


def _matches(
    overlaps: NDArray[np.float64], identities: NDArray[np.int64], tracks: NDArray[np.int64], last: dict[int, int]
) -> list[tuple[int, int]]:
    """Match the boxes of one frame; ``last`` contains the track of the previous match of each identity."""
    kept = [
        (row, column)
        for row, identity in enumerate(identities.tolist())
        for column in np.flatnonzero(tracks == last.get(identity)).tolist()
        if overlaps[row, column] >= MIN_IOU
    ]
    # Two identities may have been matched with one track: the first keeps it.
    kept = list({column: (row, column) for row, column in reversed(kept)}.values())
    rows = [row for row in range(len(identities)) if row not in {pair[0] for pair in kept}]
    columns = [column for column in range(len(tracks)) if column not in {pair[1] for pair in kept}]
    free = overlaps[np.ix_(rows, columns)]
    # A match counts more than any sum of IoUs.
    gain = np.where(free >= MIN_IOU, free + len(identities) + 1, 0)
    for row, column in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
        if free[row, column] >= MIN_IOU:
            kept.append((rows[row], columns[column]))
    return kept
