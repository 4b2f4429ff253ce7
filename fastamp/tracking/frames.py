"""Frames of a folder of numbered images or of a video file (PyAV, extra ``video``), and videos with drawn tracks."""

import colorsys
import os
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fastamp.data.decode import LARGEST_PIXELS, read_image
from fastamp.tracking.mot_file import Boxes
from fastamp.utils.errors import DataError, optional_package, writing
from fastamp.utils.files import check_not_device, expand
from fastamp.utils.fonts import load_font
from fastamp.utils.plural import plural

Frame = NDArray[np.uint8]

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_LAST_DIGITS = re.compile(r"(\d+)\D*$")
_DEFAULT_RATE = 25


class Frames:
    """Frames with numbers from 1, which can be iterated several times.

    Args:
        source: folder of images whose names end in the number of the frame, e.g. ``000001.jpg``; sequence of the MOT
            Challenge, i.e. a folder with such a folder ``img1``; or video file.
        bit_depth, decoder: see ``read_image``; those of the model, if one is used. Default: None and ``"auto"``.

    Attributes:
        path: folder or file.
        rate: frames per second; 25 for folders.
        count: number of frames, or 0 if a video does not state it.

    Raises:
        DataError: if the source is missing, has no frames, or has frames without a number or with equal numbers.
        ConfigError: if it is a video and PyAV is not installed.
    """

    def __init__(self, source: str | os.PathLike[str], *, bit_depth: int | None = None, decoder: str = "auto") -> None:
        path = expand(source)
        try:
            check_not_device(path)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}.\n  fix: pass a folder of frames or a video file"
            ) from error
        self.path = path / "img1" if (path / "img1").is_dir() else path
        self.rate = Fraction(_DEFAULT_RATE)
        self._options: dict[str, Any] = {"bit_depth": bit_depth, "decoder": decoder}
        self._files: dict[int, Path] = {}
        if self.path.is_dir():
            self._files = _numbered_images(self.path)
            self.count = len(self._files)
        else:
            with _open_video(self.path) as video:
                stream = video.streams.video[0]
                self.rate, self.count = Fraction(stream.average_rate or _DEFAULT_RATE), int(stream.frames)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the frame numbers which a folder lacks; [] for a video, whose frames are not known before."""
        return [] if not self._files else [number for number in numbers if number not in self._files]

    def read(self, needed: Iterable[int] | None = None) -> Iterator[tuple[int, Frame]]:
        """Decode frames in order.

        Args:
            needed: numbers of the frames. Default: None, all frames.

        Yields:
            Number of the frame, and (H, W, 3) uint8 RGB, turned as the EXIF data of an image or the display matrix of a
            video state.

        Raises:
            DataError: if a frame cannot be decoded, or a video ends before the last needed frame.
        """
        frames = None if needed is None else sorted(set(needed))
        if self._files:
            for number in sorted(self._files) if frames is None else frames:
                pixels = read_image(str(self._files[number]), 3, max_pixels=LARGEST_PIXELS, **self._options)
                yield number, pixels.permute(1, 2, 0).numpy()
        else:
            yield from self._decode(frames)

    def _decode(self, frames: list[int] | None) -> Iterator[tuple[int, Frame]]:
        number, chosen = 0, None if frames is None else set(frames)
        with _open_video(self.path) as video:
            try:
                for number, frame in enumerate(video.decode(video=0), start=1):
                    if chosen is None or number in chosen:
                        yield number, _upright(frame)
                    if frames and number >= frames[-1]:
                        return
            except (OSError, ValueError) as error:  # PyAV's errors are of both types
                if type(error).__module__.partition(".")[0] != "av":
                    raise
                raise DataError(
                    f"{self.path}: frame {number + 1} cannot be decoded: {error}.\n"
                    "  fix: convert the video, or cut it before this frame"
                ) from error
        if frames and frames[-1] > number:
            raise DataError(
                f"{self.path} has {plural(number, 'frame')}, but there are detections for frame {frames[-1]}.\n"
                "  fix: pass the detections of this video"
            )


def _upright(frame: Any) -> Frame:
    """Return the pixels of a decoded frame, turned and mirrored by multiples of 90 degrees as its header states."""
    pixels: Frame = frame.to_ndarray(format="rgb24")
    matrix = next((side_data for side_data in frame.side_data if side_data.type.name == "DISPLAYMATRIX"), None)
    if matrix is None:
        return pixels
    (a, b, _), (c, d, _), _ = np.frombuffer(matrix, dtype=np.int32).reshape(3, 3).tolist()
    if abs(a) < abs(b):  # columns become rows: x' = c y, y' = b x; else x' = a x, y' = d y
        pixels, (horizontal, vertical) = pixels.swapaxes(0, 1), (c, b)
    else:
        horizontal, vertical = a, d
    return np.ascontiguousarray(pixels[:: -1 if vertical < 0 else 1, :: -1 if horizontal < 0 else 1])


def _numbered_images(folder: Path) -> dict[int, Path]:
    """Return frame number -> file."""
    frames: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in _IMAGES or file.name.startswith("."):
            continue
        match = _LAST_DIGITS.search(file.stem)
        number = int(match[1]) if match else 0
        if number < 1 or number in frames:
            problem = f"the same number as {frames[number].name}" if number in frames else "no frame number from 1"
            raise DataError(
                f"{file} has {problem}.\n  fix: name the frames 000001.jpg, 000002.jpg, ... in the order of time"
            )
        frames[number] = file
    if not frames:
        raise DataError(
            f"{folder} contains no images ({', '.join(_IMAGES)}).\n"
            "  fix: pass the folder of the frames, named 000001.jpg, 000002.jpg, ..."
        )
    return frames


def import_av(purpose: str) -> ModuleType:
    """Import PyAV; raise ConfigError with the fix if it is not installed."""
    with optional_package(f"{purpose} requires PyAV", "video", "; a folder of frames does not need it"):
        import av
    return av


def _open_video(path: Path) -> Any:
    av = import_av(f"reading {path.name}, which is not a folder of images,")
    try:
        video = av.open(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as a video: {error}.\n  fix: pass a video file or a folder of frames"
        ) from error
    if not video.streams.video:
        video.close()
        raise DataError(f"{path} contains no video stream.\n  fix: pass a video file or a folder of frames")
    return video


def write_video(path: Path, frames: Iterable[tuple[int, Frame]], tracks: Boxes, rate: Fraction) -> None:
    """Write an MP4 video with the boxes and numbers of the tracks.

    Args:
        path: MP4 file.
        frames: number and (H, W, 3) uint8 RGB of each frame; all have the size of the first.
        tracks: boxes with the numbers of the tracks as ids.
        rate: frames per second.

    Raises:
        ConfigError: if PyAV is not installed.
        WriteError: if the file cannot be written.
    """
    av = import_av("writing a video")
    with writing(path), av.open(str(path), mode="w", format="mp4") as video:
        stream = None
        for number, frame in frames:
            height, width = (side // 2 * 2 for side in frame.shape[:2])  # yuv420p requires even sides
            if stream is None:
                codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
                stream = video.add_stream(codec, rate=rate, width=width, height=height, pix_fmt="yuv420p")
            drawn = draw_boxes(frame, tracks.select(tracks.frames == number))
            drawn = np.ascontiguousarray(drawn[: stream.height, : stream.width])
            video.mux(stream.encode(av.VideoFrame.from_ndarray(drawn, format="rgb24")))
        if stream is not None:
            video.mux(stream.encode())


def draw_boxes(frame: Frame, tracks: Boxes) -> Frame:
    """Return a copy of a frame (H, W, 3) with the boxes and numbers of the tracks."""
    image = Image.fromarray(frame)
    draw = ImageDraw.Draw(image)
    size = max(10, image.height // 40)
    for number, (left, top, width, height) in zip(tracks.ids.tolist(), tracks.boxes.tolist(), strict=True):
        color = track_color(number)
        draw.rectangle((left, top, left + width, top + height), outline=color, width=max(1, size // 6))
        corner = (left + 2, max(0, top - size - 2))
        draw.text(corner, str(number), fill=color, font=load_font(None, size), stroke_width=1, stroke_fill="black")
    return np.array(image)


def track_color(number: int) -> tuple[int, int, int]:
    """Return a color for a track; consecutive numbers have different hues."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618 % 1, 0.75, 1)
    return round(255 * red), round(255 * green), round(255 * blue)
