"""Tracker: association by appearance and motion, life of tracks, and the Kalman filter."""

import numpy as np
import pytest
from scipy.stats import chi2

from fastamp.tracking import Tracker, TrackerOptions
from fastamp.tracking.kalman import GATE, BoxFilter, to_measurement
from fastamp.tracking.tracker import iou
from fastamp.utils.errors import DataError


def naive_filter(boxes):
    """Run the Kalman filter of the paper with explicit matrices; return mean and covariance after the last box."""
    model, observe = np.eye(8), np.eye(4, 8)
    for index in range(4):
        model[index, index + 4] = 1
    height = boxes[0][3]
    mean = np.array([*to_measurement(boxes[0]), 0, 0, 0, 0])
    start = [height / 10, height / 10, 0.01, height / 10, height / 16, height / 16, 1e-5, height / 16]
    covariance = np.diag(np.square(start))
    for box in boxes[1:]:
        height = mean[3]
        noise = [height / 20, height / 20, 0.01, height / 20, height / 160, height / 160, 1e-5, height / 160]
        mean, covariance = model @ mean, model @ covariance @ model.T + np.diag(np.square(noise))
        height = mean[3]
        measured = np.diag(np.square([height / 20, height / 20, 0.1, height / 20]))
        innovation = observe @ covariance @ observe.T + measured
        gain = covariance @ observe.T @ np.linalg.inv(innovation)
        mean = mean + gain @ (to_measurement(box) - observe @ mean)
        covariance = (np.eye(8) - gain @ observe) @ covariance
    return mean, covariance


def test_kalman_filter_equals_the_explicit_formulas():
    rng = np.random.default_rng(0)
    boxes = [np.array([10.0 + 3 * step, 20, 40, 100]) + rng.normal(0, 1, 4) for step in range(8)]
    tracked = BoxFilter(boxes[0])
    for box in boxes[1:]:
        tracked.predict()
        tracked.update(box)
    mean, covariance = naive_filter(boxes)
    np.testing.assert_allclose(tracked.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(tracked.covariance, covariance, rtol=1e-6, atol=1e-12)
    assert tracked.mean[4] == pytest.approx(3, abs=1)  # pixels per frame
    assert chi2.ppf(0.95, 4) == pytest.approx(GATE, abs=1e-4)
    assert tracked.distances(tracked.box[None])[0] == pytest.approx(0, abs=1e-9)
    assert tracked.distances(tracked.box[None] + [200, 0, 0, 0])[0] > GATE


def test_iou_of_known_boxes():
    boxes = np.array([[0, 0, 10, 10], [5, 0, 10, 10], [10, 0, 10, 10], [2, 2, 5, 5]], dtype=float)
    np.testing.assert_allclose(iou(boxes[0], boxes), [1, 1 / 3, 0, 0.25])


def crossing(frames=40, hidden=range(16, 24)):
    """Yield boxes and features of two people who meet, hide each other, and turn back."""
    for frame in range(frames):
        if frame in hidden:
            yield np.zeros((0, 4)), np.zeros((0, 2)), []
            continue
        away = abs(frame - 20) * 5.0
        lefts = {0: 200 - away, 1: 200 + away}
        boxes = np.array([[lefts[pid], 50, 40, 100] for pid in (0, 1)])
        yield boxes, np.eye(2), [0, 1]


def tracks_by_person(tracker, use_features):
    found = {0: [], 1: []}
    for boxes, features, people in crossing():
        numbers = tracker.update(boxes, features if use_features else None)
        for person, number in zip(people, numbers.tolist(), strict=True):
            found[person].append(number)
    return found


def test_appearance_keeps_identities_that_motion_exchanges():
    with_features = tracks_by_person(Tracker(), True)
    assert set(with_features[0]) == {0} and set(with_features[1]) == {1}
    motion = tracks_by_person(Tracker(), False)
    assert len(set(motion[0])) > 1 or len(set(motion[1])) > 1


def test_track_is_confirmed_by_consecutive_detections_and_ends():
    tracker, box, none = Tracker(TrackerOptions(max_age=2)), np.array([[10, 10, 40, 100]]), np.zeros((0, 4))
    feature = np.ones((1, 3))
    assert [tracker.update(box, feature).tolist() for _ in range(2)] == [[0], [0]]
    assert tracker.confirmed == []
    assert tracker.update(box, feature).tolist() == [0] and tracker.confirmed == [0]
    for _ in range(2):
        tracker.update(none, np.zeros((0, 3)))
    assert tracker.update(box, feature).tolist() == [0]
    for _ in range(3):
        tracker.update(none, np.zeros((0, 3)))
    assert tracker.update(box, feature).tolist() == [1]  # ended after more than two frames without a detection
    tracker.update(none, np.zeros((0, 3)))
    assert tracker.update(box, feature).tolist() == [2]  # an unconfirmed track ends at once


def test_features_of_any_length_give_the_same_tracks():
    first, second = Tracker(), Tracker()
    for boxes, features, _ in crossing():
        assert first.update(boxes, features).tolist() == second.update(boxes, 7 * features).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_feature_without_a_direction_is_not_stored(bad):
    tracker, box = Tracker(), np.array([[10.0, 10, 40, 100]])
    feature, none = np.array([[1.0, 0]]), np.zeros((0, 4))
    for values in (feature, feature, feature, np.full((1, 2), bad)):
        assert tracker.update(box, values).tolist() == [0]  # by motion, if not by appearance
    for _ in range(3):
        tracker.update(none, feature[:0])
    assert tracker.update(box, feature).tolist() == [0]  # only appearance matches a track of earlier frames
    alone = Tracker()
    assert {alone.update(box, np.full((1, 2), bad)).item() for _ in range(4)} == {0}
    alone.update(none, feature[:0])
    assert alone.update(box, feature).tolist() == [0]  # a track without features is matched by motion


@pytest.mark.parametrize(
    "boxes, features",
    [
        (np.ones((2, 4)), np.ones((1, 3))),
        (np.ones((1, 4)), np.ones((2, 3))),
        (np.ones((1, 4)), np.ones(3)),
        (np.ones((1, 4)), np.ones((1, 2))),
        (np.ones((2, 2)), np.ones((1, 3))),
        (np.array([[1, 1, np.nan, 5]]), np.ones((1, 3))),
        (np.array([[1, 1, 0, 5]]), np.ones((1, 3))),
    ],
)
def test_boxes_and_features_must_belong_together(boxes, features):
    tracker = Tracker()
    tracker.update(np.ones((1, 4)), np.ones((1, 3)))
    with pytest.raises(DataError, match="fix:"):
        tracker.update(boxes, features)


def test_distance_above_the_maximum_is_no_match():
    box = np.array([[10, 10, 40, 100]])
    loose, strict = Tracker(TrackerOptions(max_distance=2)), Tracker(TrackerOptions(max_distance=0.5))
    for tracker in (loose, strict):
        for _ in range(3):
            tracker.update(box, np.array([[1.0, 0]]))
        tracker.update(np.zeros((0, 4)), np.zeros((0, 2)))
    other = np.array([[0.0, 1]])
    assert loose.update(box, other).tolist() == [0] and strict.update(box, other).tolist() == [1]
