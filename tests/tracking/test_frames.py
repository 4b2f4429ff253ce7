"""Frames of videos: the orientation that the header states."""

import numpy as np
import pytest
from PIL import Image

from fastamp.tracking.frames import Frames, write_video
from fastamp.tracking.mot_file import read_boxes

pytestmark = pytest.mark.extras
av = pytest.importorskip("av")


def write_rotated(path, pixels, **orientation):
    with av.open(str(path), "w", format="mp4") as video:
        stream = video.add_stream("mpeg4", rate=5, width=pixels.shape[1], height=pixels.shape[0], pix_fmt="yuv420p")
        stream.bit_rate = 4_000_000
        if orientation:
            stream.set_display_rotation(**orientation)
        video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode())


def corners():
    """An image of 64 x 32 pixels with a different color in each quarter."""
    colors = np.array([[[250, 10, 10], [10, 250, 10]], [[10, 10, 250], [240, 240, 240]]], dtype=np.uint8)
    return colors.repeat(16, axis=0).repeat(32, axis=1)


@pytest.mark.parametrize("flip", [{}, {"hflip": True}, {"vflip": True}])
@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_frames_are_turned_and_mirrored_as_the_header_states(tmp_path, degrees, flip):
    write_rotated(tmp_path / "x.mp4", corners(), degrees=degrees, **flip)
    expected = np.rot90(corners(), degrees // 90)
    expected = np.fliplr(expected) if "hflip" in flip else np.flipud(expected) if "vflip" in flip else expected
    [(number, frame)] = Frames(tmp_path / "x.mp4").read()
    assert number == 1 and frame.shape == expected.shape and frame.flags.c_contiguous
    assert np.abs(frame.astype(int) - expected).mean() < 25


def test_written_video_is_upright(tmp_path):
    write_rotated(tmp_path / "x.mp4", corners(), degrees=90)
    (tmp_path / "det.txt").write_text("1,1,2,2,8,8,1\n")
    tracks = read_boxes(tmp_path / "det.txt")
    source = Frames(tmp_path / "x.mp4")
    write_video(tmp_path / "out.mp4", source.read(), tracks, source.rate)
    [(_, frame)] = Frames(tmp_path / "out.mp4").read()
    assert frame.shape == (64, 32, 3)
    assert frame[-8:, :8].mean(axis=(0, 1)).argmax() == 0  # the red corner of the stored frame, without a box


def test_folder_of_frames_applies_exif(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(corners()).save(tmp_path / "1.png", exif=exif)
    [(_, frame)] = Frames(tmp_path).read()
    np.testing.assert_array_equal(frame, np.rot90(corners(), -1))
