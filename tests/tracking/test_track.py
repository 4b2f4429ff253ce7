"""Tracking of a generated sequence: features, tracks equal to those by hand, and fewer switches than by motion."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fastamp
from fastamp.cli import main
from fastamp.demo.sequence import generate_sequence
from fastamp.inference.export import export
from fastamp.tracking import Boxes, Tracker, TrackerOptions, read_boxes, tracking_metrics
from fastamp.tracking.frames import Frames
from fastamp.tracking.track import detection_features, track
from fastamp.tracking.tracker import iou
from fastamp.utils.errors import DataError


@pytest.fixture(scope="module")
def sequence(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence") / "street"
    generate_sequence(folder, people=6, frames=80)
    return folder


def colors(crops):
    """Return the mean colors of 8 horizontal stripes in the middle of each crop: features without a model."""
    features = []
    for crop in crops:
        small = np.asarray(Image.fromarray(crop).resize((6, 16)), dtype=np.float32)[:, 2:4]
        features.append(small.reshape(8, -1, 3).mean(axis=1).flatten() - 110)
    return np.stack(features)


@pytest.mark.integration
def test_appearance_gives_fewer_switches_than_motion(sequence):
    detections, truth = read_boxes(sequence / "det/det.txt"), read_boxes(sequence / "gt/gt.txt")
    random = np.random.default_rng(0)
    identities, features = np.eye(8), random.normal(0, 0.2, (len(detections), 8))
    for row, (frame, box) in enumerate(zip(detections.frames.tolist(), detections.boxes, strict=True)):
        here = np.flatnonzero(truth.frames == frame)
        features[row] += identities[truth.ids[here[iou(box, truth.boxes[here]).argmax()]]]
    motion, appearance, shuffled = (
        tracking_metrics(truth, track(detections, vectors))
        for vectors in (None, features, random.permutation(features))
    )
    assert appearance.switches < motion.switches <= shuffled.switches and appearance.idf1 > motion.idf1 + 5


def test_tracks_equal_those_of_the_same_features_by_hand(sequence):
    detections = read_boxes(sequence / "det/det.txt")
    tracks = track(detections, detection_features(Frames(sequence), detections, colors, batch=7))
    tracker, numbers = Tracker(), {}
    for frame in range(1, 81):
        rows = np.flatnonzero(detections.frames == frame)
        pixels = np.asarray(Image.open(sequence / f"img1/{frame:06d}.jpg"))
        crops = []
        for left, top, width, height in detections.boxes[rows].tolist():
            x0, y0, x1, y1 = np.rint([left, top, left + width, top + height]).astype(int).clip(0)
            crops.append(pixels[y0:y1, x0:x1])
        found = tracker.update(detections.boxes[rows], colors(crops) if crops else np.zeros((0, 24)))
        numbers.update(zip(detections.lines[rows].tolist(), found.tolist(), strict=True))
    by_hand = {
        line: tracker.confirmed.index(number) + 1 for line, number in numbers.items() if number in tracker.confirmed
    }
    assert dict(zip(tracks.lines.tolist(), tracks.ids.tolist(), strict=True)) == by_hand


def test_boxes_outside_the_frame_have_no_feature(sequence, tmp_path, caplog):
    path = tmp_path / "det.txt"
    path.write_text("1,-1,600,10,50,100,1\n1,-1,10,10,50,100,1\n2,-1,10,-200,50,100,1\n")
    features = detection_features(Frames(sequence), read_boxes(path), colors, batch=8)
    assert np.isnan(features).all(axis=1).tolist() == [True, False, True]
    assert "2 of 3" in caplog.text and "line 1: 600,10,50,100" in caplog.text and "less than" not in caplog.text
    path.write_text("1,-1,10,10,50,100,1\n2,-1,10,10,5,9,1\n")
    assert np.isfinite(detection_features(Frames(sequence), read_boxes(path), colors, batch=8)).all()
    assert "1 of 2 boxes" in caplog.text and "line 2" in caplog.messages[-1]
    path.write_text("1,-1,600,10,50,100,1\n")
    with pytest.raises(DataError, match=r"det\.txt: .*1 of 1;.*line 1: 600,10,50,100"):
        detection_features(Frames(sequence), read_boxes(path), colors, batch=8)
    path.write_text("1,-1,-20,-20,50,100,1\n")  # partly outside: cut off
    assert detection_features(Frames(sequence), read_boxes(path), colors, batch=8).shape == (1, 24)


def test_frame_numbers_in_the_millions_give_the_same_tracks(monkeypatch):
    count, update = 0, Tracker.update

    def counted(*args):
        nonlocal count
        count += 1
        return update(*args)

    monkeypatch.setattr(Tracker, "update", counted)
    frames = np.repeat(np.arange(1, 6), 2)
    boxes = np.tile([[10.0, 10, 40, 90], [200, 10, 40, 90]], (5, 1))
    found = [
        track(Boxes(Path("x"), np.arange(10), numbers, -np.ones(10), boxes, np.ones(10)), np.tile(np.eye(2), (5, 1)))
        for numbers in (frames, frames + 30_000_000, np.where(frames > 3, frames + 40_000_000, frames))
    ]
    assert found[0].ids.tolist() == found[1].ids.tolist() == [1, 2] * 5
    assert found[2].ids.tolist() == [1, 2] * 3  # the second part is too short for a track
    assert 15 <= count < 15 + 3 * 40


def test_command_writes_tracks_csv_and_sheet(sequence, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["track", str(sequence), "--gt", str(sequence / "gt/gt.txt"), "-o", str(out)]) == 0
    assert "identity switches, MOTA" in capsys.readouterr().out
    tracks = read_boxes(out / "tracks.txt")
    with (out / "tracks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["track"]) for row in rows] == tracks.ids.tolist() and set(rows[0]) >= {"frame", "line", "left"}
    assert np.asarray(Image.open(out / "tracks.png")).std() > 10


def test_command_with_a_model_equals_features_by_hand(sequence, checkpoint, tmp_path, capsys):
    det = tmp_path / "det.txt"
    lines = (sequence / "det/det.txt").read_text().splitlines(keepends=True)[:60]
    det.write_text("".join([*lines, "80,-1,9000,10,20,40,1\n"]))  # the last box is outside its frame
    out = tmp_path / "out"
    command = ["track", str(sequence), "--detections", str(det), "--model", str(checkpoint), "-o", str(out)]
    assert main([*command, "--device", "cpu", "--max-distance", "0.5"]) == 0
    detections, predictor = read_boxes(det), fastamp.Predictor(checkpoint, device="cpu")
    features = []
    for frame in np.unique(detections.frames).tolist():
        boxes = detections.boxes[detections.frames == frame]
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        features.append(predictor.features(sequence / f"img1/{frame:06d}.jpg", boxes=corners))
    expected = track(detections, np.concatenate(features), TrackerOptions(max_distance=0.5))
    found = read_boxes(out / "tracks.txt")
    assert found.ids.tolist() == expected.ids.tolist() and len(found) > 30


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".xml", marks=pytest.mark.extras)])
def test_command_with_an_exported_model_gives_the_tracks_of_the_checkpoint(suffix, sequence, checkpoint, tmp_path):
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino"}[suffix])
    det, model = tmp_path / "det.txt", tmp_path / f"model{suffix}"
    det.write_text("".join((sequence / "det/det.txt").read_text().splitlines(keepends=True)[:60]))
    float32 = ["SOLVER.AMP.EVAL_DTYPE", "float32"]
    export(fastamp.Predictor(checkpoint, device="cpu", opts=float32), model, data="")
    for name, source, options in (("exported", model, []), ("checkpoint", checkpoint, ["--device", "cpu", *float32])):
        command = ["track", str(sequence), "--detections", str(det), "--model", str(source), "--max-distance", "0.5"]
        assert main([*command, "-o", str(tmp_path / name), *options]) == 0
    found, expected = (read_boxes(tmp_path / name / "tracks.txt") for name in ("exported", "checkpoint"))
    assert found.ids.tolist() == expected.ids.tolist() and len(found) > 30


@pytest.mark.parametrize("problem", ["empty", "missing frame", "unnumbered", "no detections"])
def test_invalid_input_is_one_message(problem, sequence, tmp_path, input_error):
    source, det = tmp_path / "frames", tmp_path / "det.txt"
    source.mkdir()
    det.write_text("1,-1,0,0,20,20,1\n3,-1,0,0,20,20,1\n")
    Image.new("RGB", (40, 40)).save(source / ("first.png" if problem == "unnumbered" else "frame_1.png"))
    if problem == "empty":
        (source / "frame_1.png").unlink()
    arguments = ["track", str(source), "-o", str(tmp_path / "out")]
    arguments += [] if problem == "no detections" else ["--detections", str(det)]
    error = input_error(main, arguments)
    assert "fix:" in error and "Traceback" not in error and not (tmp_path / "out").exists()
    if problem == "missing frame":
        assert "det.txt, line 2: frame 3" in error


def test_output_is_checked_before_the_model_is_loaded(sequence, tmp_path, input_error, capsys):
    (tmp_path / "file").touch()
    arguments = ["track", str(sequence), "--model", "damaged.pth", "-o"]
    error = input_error(main, [*arguments, str(tmp_path / "file/out")])
    assert "--output" in error and "fix:" in error and "damaged.pth" not in error
    assert main([*arguments, str(tmp_path / "new/out")]) == 2
    assert "damaged.pth" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.extras
def test_video_is_read_and_written(sequence, tmp_path, capsys):
    pytest.importorskip("av")
    out = tmp_path / "out"
    assert main(["track", str(sequence), "-o", str(out), "--video"]) == 0
    video = Frames(out / "tracks.mp4")
    frames = dict(video.read([1, 50, 80]))
    assert video.count == 80 and sorted(frames) == [1, 50, 80] and frames[1].shape == (256, 512, 3)
    with pytest.raises(DataError, match="has 80 frames"):
        list(video.read([81]))
    detections = str(sequence / "det/det.txt")
    again = ["track", str(out / "tracks.mp4"), "--detections", detections, "-o", str(tmp_path / "again")]
    assert main(again) == 0
    assert (tmp_path / "again/tracks.txt").read_text() == (out / "tracks.txt").read_text()
