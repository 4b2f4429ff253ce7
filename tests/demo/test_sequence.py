"""Generated tracking sequence: reproducible, complete or absent, with occlusions and detections on the people."""

import numpy as np
import pytest

from fastamp.cli import main
from fastamp.demo.sequence import generate_sequence, is_complete_sequence
from fastamp.tracking import read_boxes
from fastamp.tracking.tracker import iou
from fastamp.utils.errors import DataError


@pytest.fixture(scope="module")
def sequence(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence") / "street"
    generate_sequence(folder, people=3, frames=40)
    return folder


@pytest.mark.integration
def test_same_arguments_write_identical_files(sequence, tmp_path):
    generate_sequence(tmp_path / "again", people=3, frames=40)
    for path in sorted(path for path in sequence.rglob("*") if path.is_file()):
        assert (tmp_path / "again" / path.relative_to(sequence)).read_bytes() == path.read_bytes()


def test_layout_and_occlusions(sequence):
    assert is_complete_sequence(sequence) and len(list((sequence / "img1").glob("*.jpg"))) == 40
    assert "seqLength=40" in (sequence / "seqinfo.ini").read_text()
    truth = read_boxes(sequence / "gt/gt.txt")
    assert len(truth) == 120 and set(truth.ids.tolist()) == {1, 2, 3}
    assert 0 < (truth.confidences == 0).sum() < 60  # hidden, but not most of the time


def test_detections_are_on_visible_people(sequence):
    truth, detections = read_boxes(sequence / "gt/gt.txt"), read_boxes(sequence / "det/det.txt")
    visible = truth.select(truth.confidences == 1)
    best = [
        iou(box, visible.boxes[visible.frames == frame]).max(initial=0)
        for frame, box in zip(detections.frames.tolist(), detections.boxes, strict=True)
    ]
    assert np.mean(np.array(best) > 0.7) > 0.9 and len(detections) > 0.9 * len(visible)


def test_other_folders_are_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo.jpg").write_text("x")
    with pytest.raises(DataError):
        generate_sequence(tmp_path / "mine", frames=1)
    with pytest.raises(ValueError):
        generate_sequence(tmp_path / "x", frames=0)


def test_command_generates_a_sequence(tmp_path, capsys, monkeypatch):
    from fastamp.cli import demo

    monkeypatch.setattr(demo, "FRAMES", 2)
    assert main(["demo", "--sequence", str(tmp_path / "street")]) == 0
    assert is_complete_sequence(tmp_path / "street") and "2 frames" in capsys.readouterr().out
