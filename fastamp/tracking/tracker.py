"""Association of detections to tracks by appearance and motion: DeepSORT (Wojke et al. 2017, arXiv:1703.07402).

Without features, all tracks are associated by overlap with the predicted box, as in SORT (Bewley et al. 2016,
arXiv:1602.00763).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fastamp.tracking.kalman import GATE, Array, BoxFilter
from fastamp.utils.errors import DataError

_REJECTED = 1e5


@dataclass(frozen=True)
class TrackerOptions:
    """Options of ``Tracker``; the defaults are those of DeepSORT, except for ``max_distance``.

    Attributes:
        max_distance: largest cosine distance of a match by appearance, in 0..2. Default 0.3: DeepSORT's 0.2, for its
            own network, gave up to three times as many identity switches on the sequences of the demo.
        max_iou_distance: largest 1 - IoU of a match by overlap, in 0..1. Default 0.7.
        max_age: a track ends after more than this number of frames without a detection, at least 1. Default 30.
        min_hits: consecutive detections that confirm a track, at least 1. Default 3.
        budget: stored features of a track, at least 1. Default 100.
    """

    max_distance: float = 0.3
    max_iou_distance: float = 0.7
    max_age: int = 30
    min_hits: int = 3
    budget: int = 100


@dataclass(eq=False)
class _Track:
    """Track of one identity, with its last features of unit length."""

    number: int
    filter: BoxFilter
    features: deque[Array]
    hits: int = 1
    age: int = 0
    confirmed: bool = field(default=False)


class Tracker:
    """Tracker of one sequence; call ``update`` for each frame in order, also for frames without detections.

    Confirmed tracks are first matched by appearance, the most recently seen first (matching cascade): the distance is
    the smallest cosine distance to the stored features of a track, and boxes outside the 0.95 gate of the Kalman
    filter are excluded. Remaining detections are matched by overlap with unconfirmed tracks and with tracks of the
    previous frame, or without features with all tracks. A detection without a match starts a track, which is deleted
    if one of the next ``min_hits - 1`` frames has no detection of it.

    Args:
        options: options. Default: ``TrackerOptions()``.

    Attributes:
        confirmed: numbers of the tracks that were confirmed, in this order.
    """

    def __init__(self, options: TrackerOptions | None = None) -> None:
        self.options = options or TrackerOptions()
        self.confirmed: list[int] = []
        self._tracks: list[_Track] = []
        self._count = 0

    def update(self, boxes: Array, features: NDArray[np.floating] | None = None) -> NDArray[np.int64]:
        """Associate the detections of the next frame.

        Args:
            boxes: (N, 4) left, top, width and height in pixels.
            features: (N, D) features of the boxes, of any length above 0. Default: None, association by motion only. A
                box whose feature is zero or not finite, e.g. of ``Predictor.features`` for a box outside the frame, is
                associated by motion only.

        Returns:
            (N,) numbers of the tracks, from 0; only those in ``confirmed`` are final.

        Raises:
            DataError: if a box is not finite or has no area, the numbers of boxes and features differ, or D differs
                from that of earlier frames.
        """
        boxes = _checked_boxes(boxes)
        units = None if features is None else self._unit_length(features, len(boxes))
        for track in self._tracks:
            track.filter.predict()
            track.age += 1
        numbers = np.full(len(boxes), -1, dtype=np.int64)
        for track, row in self._associate(boxes, units):
            track.filter.update(boxes[row])
            track.hits, track.age = track.hits + 1, 0
            self._add(track, row, units)
            numbers[row] = track.number
        for row in np.flatnonzero(numbers < 0).tolist():
            track = _Track(self._count, BoxFilter(boxes[row]), deque(maxlen=self.options.budget))
            self._count += 1
            self._tracks.append(track)
            self._add(track, row, units)
            numbers[row] = track.number
        self._tracks = [
            track for track in self._tracks if track.age <= (self.options.max_age if track.confirmed else 0)
        ]
        return numbers

    def _add(self, track: _Track, row: int, units: Array | None) -> None:
        """Store the feature of a detection, and confirm the track if it has enough detections."""
        if units is not None and not np.isnan(units[row, 0]):
            track.features.append(units[row])
        if not track.confirmed and track.hits >= self.options.min_hits:
            track.confirmed = True
            self.confirmed.append(track.number)

    def _associate(self, boxes: Array, units: Array | None) -> list[tuple[_Track, int]]:
        """Return pairs of a track and the row of its detection."""
        pairs: list[tuple[_Track, int]] = []
        rows = list(range(len(boxes)))
        candidates = [track for track in self._tracks if track.confirmed]
        if units is not None:
            for age in sorted({track.age for track in candidates}):
                tracks = [track for track in candidates if track.age == age]
                pairs += self._match(tracks, rows, [self._appearance(track, boxes, units) for track in tracks])
        matched = {id(track) for track, _ in pairs}
        others = [track for track in self._tracks if id(track) not in matched]
        motion_only = units is None
        others = [
            track for track in others if motion_only or not (track.confirmed and track.features) or track.age == 1
        ]
        costs = [_overlap_cost(track, boxes, self.options.max_iou_distance) for track in others]
        return pairs + self._match(others, rows, costs)

    def _appearance(self, track: _Track, boxes: Array, units: Array) -> Array:
        """Return the costs (N,) of a track by appearance, within the gate of the Kalman filter."""
        if not track.features:
            return np.full(len(boxes), _REJECTED)
        distances = 1 - (units @ np.stack(track.features).T).max(axis=1, initial=-1)
        inside = track.filter.distances(boxes) <= GATE
        return np.where(inside & (distances <= self.options.max_distance), distances, _REJECTED)

    def _match(self, tracks: Sequence[_Track], rows: list[int], costs: Sequence[Array]) -> list[tuple[_Track, int]]:
        """Match tracks to the detections ``rows`` with the smallest total cost; matched rows are removed from it."""
        if not tracks or not rows:
            return []
        matrix = np.stack(costs)[:, rows]
        chosen = [(number, rows[column]) for number, column in zip(*linear_sum_assignment(matrix), strict=True)]
        pairs = [(tracks[number], row) for number, row in chosen if costs[number][row] < _REJECTED]
        for _, row in pairs:
            rows.remove(row)
        return pairs

    def _unit_length(self, features: NDArray[np.floating], count: int) -> Array:
        """Return the features of ``count`` boxes with unit length; NaN for those that are zero or not finite."""
        values = np.asarray(features, dtype=np.float64)
        if values.ndim != 2 or len(values) != count or not values.shape[1]:
            raise DataError(
                f"features must have shape ({count}, D), one for each box; got {values.shape}.\n"
                "  fix: pass the features of the boxes of this frame"
            )
        dimension = next((len(track.features[0]) for track in self._tracks if track.features), values.shape[1])
        if count and values.shape[1] != dimension:
            raise DataError(
                f"the features have dimension {values.shape[1]}, those of earlier frames {dimension}.\n"
                "  fix: use one model for all frames of a sequence"
            )
        largest = np.abs(values).max(axis=1, keepdims=True)
        values = values / np.where(np.isfinite(largest) & (largest > 0), largest, np.nan)
        return values / np.linalg.norm(values, axis=1, keepdims=True)


def _checked_boxes(boxes: Array) -> Array:
    """Return boxes (N, 4) as float64; raise DataError if one is not finite or has no area."""
    values = np.asarray(boxes, dtype=np.float64)
    values = values.reshape(0, 4) if not values.size else values
    if values.ndim != 2 or values.shape[1] != 4:
        raise DataError(
            f"boxes must have shape (N, 4); got {values.shape}.\n"
            "  fix: pass left, top, width and height in pixels for each box"
        )
    valid = np.isfinite(values).all(axis=1) & (values[:, 2:] > 0).all(axis=1)
    if not valid.all():
        row = int(np.argmin(valid))
        raise DataError(
            f"box {row} has left, top, width and height {values[row].tolist()}; expected finite numbers and a size "
            "above 0.\n  fix: exclude this box"
        )
    return values


def iou(box: Array, boxes: Array) -> Array:
    """Return the intersections over unions (N,) of a box (4,) and boxes (N, 4): left, top, width and height."""
    corners = np.minimum(box[:2] + box[2:], boxes[:, :2] + boxes[:, 2:])
    sides = np.clip(corners - np.maximum(box[:2], boxes[:, :2]), 0, None)
    common = sides.prod(axis=1)
    return common / (box[2:].prod() + boxes[:, 2:].prod(axis=1) - common)


def _overlap_cost(track: _Track, boxes: Array, largest: float) -> Array:
    distances = 1 - iou(track.filter.box, boxes)
    return np.where(distances <= largest, distances, _REJECTED)
