"""Adapters for BoxMOT and Ultralytics: their interface without the packages, and tracks with the packages."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import fastamp
from fastamp.demo.sequence import generate_sequence
from fastamp.inference.export import export
from fastamp.integrations import BoxmotReID, UltralyticsReID
from fastamp.tracking import read_boxes
from fastamp.utils.errors import ConfigError

BOXES = np.array([[10, 20, 60, 140], [30.4, 5.6, 70.2, 99.9]], dtype=np.float32)


@pytest.fixture(scope="module")
def frame():
    return np.random.default_rng(0).integers(0, 256, (160, 120, 3), dtype=np.uint8)


def unit(features):
    features = np.asarray(features, dtype=np.float32)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def test_features_are_those_of_the_predictor_for_a_bgr_frame(predictor, checkpoint, frame):
    expected = unit(predictor.features(np.ascontiguousarray(frame[..., ::-1]), boxes=BOXES))
    found = BoxmotReID(checkpoint, device="cpu").get_features(BOXES, frame)
    np.testing.assert_array_equal(found, expected)
    centers = np.concatenate([(BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2], [[0], [1]]], axis=1)
    features = UltralyticsReID(predictor)(frame, centers)
    np.testing.assert_array_equal(np.stack(features), expected)


def test_boxes_without_pixels_and_no_boxes(predictor, frame):
    boxes = np.array([[-50, -50, -10, -10], [500, 500, 600, 600], [5, 5, 5, 5]])
    missing = np.where(np.eye(4, dtype=bool), np.nan, [1, 2, 10, 20])
    boxes = np.concatenate([boxes, missing, np.full((1, 4), np.nan)])
    features = BoxmotReID(predictor).get_features(boxes, frame)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=1e-5)
    reid = BoxmotReID(predictor)
    mixed = reid.get_features(np.concatenate([boxes[:2], BOXES]), frame)
    np.testing.assert_array_equal(mixed[2:], BoxmotReID(predictor).get_features(BOXES, frame))
    np.testing.assert_array_equal(mixed[:2], features[:2])
    assert reid.outside == 2
    shifted = np.array([[-30, -40, 30, 60], [100, 120, 190, 300]])
    expected = unit(predictor.features(frame, boxes=shifted, color="bgr"))
    np.testing.assert_allclose(reid.get_features(shifted, frame), expected, atol=1e-6)
    assert BoxmotReID(predictor).get_features(np.zeros((0, 4)), frame).shape == (0, features.shape[1])
    assert UltralyticsReID(predictor)(frame, np.zeros((0, 4))) == []


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".xml", marks=pytest.mark.extras)])
@pytest.mark.parametrize("normalization", [True, False])
def test_exported_file_gives_the_same_features(predictor, frame, tmp_path, suffix, normalization):
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino"}[suffix])
    export(predictor, tmp_path / f"model{suffix}", data="", normalization=normalization)
    boxes = np.concatenate([BOXES + shift for shift in range(5)])  # more than one batch
    found = BoxmotReID(tmp_path / f"model{suffix}").get_features(boxes, frame)
    expected = fastamp.Predictor(predictor.checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])
    # The parity check of the export allows a cosine of 0.9999.
    assert (found * BoxmotReID(expected).get_features(boxes, frame)).sum(axis=1).min() > 0.9999


def test_attach_makes_the_adapter_the_encoder_of_an_ultralytics_tracker(predictor):
    reid = UltralyticsReID(predictor)
    tracker = SimpleNamespace(encoder=None, args=SimpleNamespace(with_reid=False, model="auto"))
    callbacks = {}
    reid.use_in(SimpleNamespace(add_callback=callbacks.__setitem__))
    callbacks["on_predict_batch_start"](SimpleNamespace(trackers=[tracker]))
    assert tracker.encoder is reid and tracker.args.with_reid and tracker.args.model != "auto"
    with pytest.raises(ConfigError, match="ByteTrack"):
        reid.attach(type("ByteTrack", (), {})())


@pytest.fixture(scope="module")
def sequence(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence") / "street"
    generate_sequence(folder, people=4, frames=30)
    return folder


def frames_of(sequence):
    """Yield BGR frames with rows (N, 6) of corners, confidence and class."""
    detections = read_boxes(sequence / "det/det.txt")
    for number in range(1, 31):
        rows = detections.frames == number
        boxes, confidences = detections.boxes[rows], detections.confidences[rows]
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        table = np.concatenate([corners, confidences[:, None], np.zeros((len(boxes), 1))], axis=1)
        pixels = np.asarray(Image.open(sequence / f"img1/{number:06d}.jpg"))
        yield np.ascontiguousarray(pixels[..., ::-1]), table.astype(np.float32)


@pytest.mark.extras
@pytest.mark.parametrize("name", ["BotSort", "StrongSort"])
def test_boxmot_tracks_equal_those_of_the_same_embeddings_by_hand(name, sequence, predictor):
    boxmot, torch = pytest.importorskip("boxmot"), pytest.importorskip("torch")
    structures = pytest.importorskip("boxmot.structures")
    reid = BoxmotReID(predictor)
    tracker, by_hand = getattr(boxmot, name)(reid_model=reid), getattr(boxmot, name)()
    found, expected = [], []
    for frame, table in frames_of(sequence):
        found += np.asarray(tracker.update(table, frame))[:, 4].tolist()
        detections = structures.Detections(
            geometry=structures.Boxes(torch.from_numpy(table[:, :4].copy())),
            scores=torch.from_numpy(table[:, 4].copy()),
            class_ids=torch.zeros(len(table), dtype=torch.int64),
            sample_id="frame",
            embeddings=torch.from_numpy(reid.get_features(table[:, :4], frame)),
        )
        pixels = torch.from_numpy(np.ascontiguousarray(frame[..., ::-1].transpose(2, 0, 1)))
        tracks = by_hand.update(detections, structures.Frame(image=pixels, sample_id="frame"))
        expected += tracks.track_ids.tolist()
    assert found == expected and len(found) > 50


@pytest.mark.extras
def test_ultralytics_tracks_equal_those_of_the_same_embeddings_by_hand(sequence, predictor):
    trackers = pytest.importorskip("ultralytics.trackers")
    boxes_type = pytest.importorskip("ultralytics.engine.results").Boxes
    reid = UltralyticsReID(predictor)
    options = {"track_high_thresh": 0.25, "track_low_thresh": 0.1, "new_track_thresh": 0.25, "track_buffer": 30}
    options |= {"match_thresh": 0.8, "fuse_score": True, "gmc_method": "none", "proximity_thresh": 0.5}
    options |= {"appearance_thresh": 0.8, "with_reid": False, "model": "auto"}
    tracker, by_hand = (trackers.BOTSORT(SimpleNamespace(**options)) for _ in range(2))
    reid.attach(tracker)
    by_hand.encoder, by_hand.args.with_reid = (lambda features, _: list(features)), True
    found, expected = [], []
    for frame, table in frames_of(sequence):
        boxes = boxes_type(table, frame.shape[:2])
        found += tracker.update(boxes, frame)[:, 4].tolist()
        features = np.array(reid(frame, boxes.xywh))
        expected += by_hand.update(boxes, frame, feats=features)[:, 4].tolist()
    assert found == expected and len(found) > 50
