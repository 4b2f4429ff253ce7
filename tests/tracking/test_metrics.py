"""Identity switches, MOTA and IDF1: against a naive computation, and known cases."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from fastamp.tracking import Boxes, tracking_metrics
from fastamp.utils.errors import DataError


def boxes_of(rows):
    """Build boxes from rows (frame, id, left[, confidence]); each box is 10 x 20 pixels."""
    rows = sorted(rows, key=lambda row: row[0])
    boxes = np.array([[row[2], 0, 10, 20] for row in rows], dtype=float).reshape(-1, 4)
    confidences = np.array([row[3] if len(row) > 3 else 1.0 for row in rows])
    frames, ids = (np.array([row[column] for row in rows], dtype=np.int64) for column in (0, 1))
    return Boxes(Path("x"), np.arange(1, len(rows) + 1), frames, ids, boxes, confidences)


def naive_overlap(first, second):
    common = max(0.0, 10 - abs(first - second)) * 20
    return common / (400 - common)


def naive_metrics(truth, found):
    """Return switches, misses, false positives and the boxes with the correct identity, by trying all assignments."""
    last, switches, matches = {}, 0, 0
    for frame in sorted({row[0] for row in truth + found}):
        here, there = ([row[1:3] for row in rows if row[0] == frame] for rows in (truth, found))
        kept = {}
        for pid, left in here:
            for track, other in there:
                if last.get(pid) == track and track not in kept.values() and naive_overlap(left, other) >= 0.5:
                    kept[pid] = track
        free = [row for row in here if row[0] not in kept]
        spare = [row for row in there if row[0] not in kept.values()] + [None] * len(free)
        best = max(
            (
                [
                    (pid, row[0], naive_overlap(left, row[1]))
                    for (pid, left), row in zip(free, choice, strict=True)
                    if row is not None and naive_overlap(left, row[1]) >= 0.5
                ]
                for choice in set(permutations(spare, len(free)))
            ),
            key=lambda pairs: (len(pairs), sum(pair[2] for pair in pairs)),
        )
        pairs = {**kept, **{pid: track for pid, track, _ in best}}
        matches += len(pairs)
        for pid, track in pairs.items():
            switches += last.get(pid, track) != track
            last[pid] = track
    pids, tracks = sorted({row[1] for row in truth}), sorted({row[1] for row in found})
    tracks += [None] * len(pids)
    correct = max(
        sum(
            any(frame == row[0] and track == row[1] and naive_overlap(left, row[2]) >= 0.5 for row in found)
            for identity, track in zip(pids, choice, strict=True)
            for frame, pid, left in truth
            if pid == identity
        )
        for choice in set(permutations(tracks, len(pids)))
    )
    return switches, len(truth) - matches, len(found) - matches, correct


@pytest.mark.parametrize("seed", range(12))
def test_metrics_equal_a_naive_computation(seed):
    rng = np.random.default_rng(seed)
    truth = [(frame, pid, 8.0 * pid + rng.normal(0, 2)) for frame in range(1, 9) for pid in range(3)]
    found = []
    for frame, pid, left in truth:
        if rng.random() < 0.85:
            track = pid if rng.random() < 0.8 else int(rng.integers(3))
            if not any(row[:2] == (frame, track) for row in found):
                found.append((frame, track, left + rng.normal(0, 2)))
    metrics = tracking_metrics(boxes_of(truth), boxes_of(found))
    switches, misses, false_positives, correct = naive_metrics(truth, found)
    assert (metrics.switches, metrics.misses, metrics.false_positives) == (switches, misses, false_positives)
    assert metrics.mota == pytest.approx(100 * (1 - (misses + false_positives + switches) / len(truth)))
    assert metrics.idf1 == pytest.approx(200 * correct / (len(truth) + len(found)))


def test_a_switch_counts_once_and_halves_the_correct_identities():
    truth = [(frame, 1, 0.0) for frame in range(1, 11)]
    found = [(frame, 1 if frame <= 5 else 2, 0.0) for frame in range(1, 11)]
    metrics = tracking_metrics(boxes_of(truth), boxes_of(found))
    assert (metrics.switches, metrics.mota, metrics.idf1) == (1, 90.0, 50.0)


def test_perfect_and_empty_tracks():
    truth = [(frame, pid, 30.0 * pid) for frame in range(1, 4) for pid in range(2)]
    perfect = tracking_metrics(boxes_of(truth), boxes_of([(frame, pid + 7, left) for frame, pid, left in truth]))
    assert (perfect.switches, perfect.mota, perfect.idf1) == (0, 100.0, 100.0)
    empty = tracking_metrics(boxes_of(truth), boxes_of([]))
    assert (empty.misses, empty.mota, empty.idf1) == (6, 0.0, 0.0)
    assert np.isnan(tracking_metrics(boxes_of([]), boxes_of([])).mota)


def test_ground_truth_with_confidence_0_is_not_counted():
    truth = [(1, 1, 0.0, 1.0), (2, 1, 0.0, 0.0)]
    assert tracking_metrics(boxes_of(truth), boxes_of([(1, 1, 0.0)])).boxes == 1


@pytest.mark.parametrize("rows, message", [([(1, 1, 0.0), (1, 1, 50.0)], "id 1"), ([(1, -1, 0.0)], "-1")])
def test_an_id_twice_in_a_frame_or_below_0_is_an_error(rows, message):
    good = [(1, 1, 0.0), (2, 1, 0.0)]
    for truth, found in ((rows, good), (good, rows)):
        with pytest.raises(DataError, match=f"x, line {len(rows)}: .*{message}"):
            tracking_metrics(boxes_of(truth), boxes_of(found))
    excluded = [(frame, pid, left, 0.0) for frame, pid, left in rows]
    assert tracking_metrics(boxes_of(good + excluded), boxes_of(good)).mota == 100
