"""Messages of fastamp/tracking: detections, frames and videos that cannot be tracked."""

import sys
from types import SimpleNamespace
from unittest import mock

import PIL.Image
import pytest
from messages import Recorder

from fastamp.demo.sequence import generate_sequence
from fastamp.integrations import UltralyticsReID
from fastamp.tracking import read_boxes
from fastamp.tracking.frames import Frames, write_video
from fastamp.tracking.track import check_frames, check_output, extract_features

SITES = ["fastamp/tracking", "fastamp/integrations"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    street = record.root / "street"
    generate_sequence(street, people=1, frames=2)
    detections(record, street)
    frames(record)
    videos(record, street)
    with record("tracker of Ultralytics without a ReID model"):
        UltralyticsReID(Model()).attach(Model())


def detections(record, street):
    """Read invalid detections, and track them."""
    for text in (
        "",
        "1 -1 0 0 5 5\n",
        "1,-1,0,zero,5,5\n",
        "1.5,-1,0,0,5,5\n",
        "0,-1,0,0,5,5\n",
        "1,-1,10,10,5,5\n2,-1,10,10,-5,5\n",
    ):
        with record(f"detections {text!r}"):
            read_boxes(record.file("det.txt", text))
    with record("missing detections"):
        read_boxes(record.root / "nowhere.txt")
    for text in ("1,-1,600,10,50,100\n", "1,-1,10,10,50,100\n3,-1,10,10,50,100\n"):
        model = Model()
        path = record.file("det.txt", text)
        with record(f"tracking of {text!r}"):
            found, source = read_boxes(path), Frames(street)
            check_frames(source, found)
            extract_features(source, found, model, batch=4)
    with record("output below a file"):
        check_output(record.file("a.txt", "") / "out")


class Model:
    """Model that is not reached."""


def frames(record):
    """Read folders without numbered frames."""
    empty = record.root / "frames"
    empty.mkdir()
    with record("folder without images"):
        Frames(empty)
    PIL.Image.new("RGB", (8, 8)).save(empty / "first.png")
    with record("frame without a number"):
        Frames(empty)
    (empty / "first.png").rename(empty / "a1.png")
    PIL.Image.new("RGB", (8, 8)).save(empty / "b01.png")
    with record("two frames of one number"):
        Frames(empty)
    with record("missing folder"):
        Frames(record.root / "nowhere")


class Video:
    """Stand-in of a container of PyAV, so that these messages do not depend on an installed package."""

    def __init__(self, streams, frames=(), error=None):
        self.streams = SimpleNamespace(video=[SimpleNamespace(average_rate=25, frames=0)] * streams)
        self.frames, self.error = frames, error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def close(self):
        """Do nothing."""

    def decode(self, video):
        """Yield the frames, then raise the error."""
        yield from self.frames
        if self.error:
            raise self.error


class InvalidDataError(OSError):
    """Error of PyAV."""

    __module__ = "av.error"


def videos(record, street):
    """Read videos that are none, that end early, and without PyAV."""
    path = record.file("video.mp4", "x")
    with record("video without PyAV"), mock.patch.dict(sys.modules, {"av": None}):
        Frames(path)
    pixels = SimpleNamespace(to_ndarray=lambda format: None)
    failing = mock.Mock(side_effect=OSError("Invalid data found when processing input"))
    cases = {
        "file that is not a video": failing,
        "file without a video stream": lambda _: Video(0),
        "video that ends early": lambda _: Video(1, [pixels]),
        "damaged frame": lambda _: Video(1, [pixels], InvalidDataError("Invalid data")),
    }
    for title, opened in cases.items():
        with record(title), mock.patch.dict(sys.modules, {"av": SimpleNamespace(open=opened)}):
            list(Frames(path).read([2]))
    with record("video that cannot be written"), mock.patch.dict(sys.modules, {"av": None}):
        write_video(record.root / "x.mp4", [], read_boxes(street / "gt/gt.txt"), 25)
