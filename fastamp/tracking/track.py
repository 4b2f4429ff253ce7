"""Tracking of detections in a sequence of frames with the features of a model."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

from fastamp.data.boxes import clip_box, warn_of_small_boxes
from fastamp.tracking.frames import Frame, Frames, track_color
from fastamp.tracking.mot_file import Boxes
from fastamp.tracking.tracker import Tracker, TrackerOptions
from fastamp.utils import files
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import write_atomically
from fastamp.utils.fonts import load_font
from fastamp.utils.plural import plural
from fastamp.utils.progress import ProgressBar

logger = logging.getLogger(__name__)

_SHEET_ROWS, _SHEET_COLUMNS = 40, 12  # tracks of a contact sheet, and crops of a track

Embed = Callable[[list[Frame]], NDArray[np.float32]]
"""Function: list of N images (H, W, 3) uint8 RGB -> (N, D) float32 features."""


class Model(Protocol):
    """Model with the method ``features`` of ``fastamp.Predictor``."""

    @property
    def features(self) -> Callable[..., Any]:
        """Function: images -> features (N, D)."""


def embedder(model: Model, **options: Any) -> Embed:
    """Return a function that computes the features of crops.

    Args:
        model: ``Predictor`` or ``ExportedModel``.
        options: further arguments of ``Predictor.features`` with one value for all images: ``camids``, ``viewids``.
    """

    def embed(crops: list[Frame]) -> NDArray[np.float32]:
        ids = {name: [value] * len(crops) for name, value in options.items()}
        return np.asarray(model.features(crops, **ids), dtype=np.float32)

    return embed


def check_frames(frames: Frames, detections: Boxes) -> None:
    """Check that a folder contains the frames of all detections, before a model is loaded.

    Raises:
        DataError: if a frame is missing; the message names the line of its first detection.
    """
    missing = frames.missing(np.unique(detections.frames).tolist())
    if missing:
        line = int(detections.lines[detections.frames == missing[0]].min())
        raise DataError(
            f"{detections.path}, line {line}: frame {missing[0]} is not in {frames.path} "
            f"({plural(frames.count, 'frame')}; {plural(len(missing), 'frame')} with detections missing).\n"
            "  fix: pass the frames of these detections"
        )


def check_output(folder: str | os.PathLike[str]) -> Path:
    """Return the path of an output folder, which need not exist, and check that it can be written.

    Raises:
        ConfigError: if the folder, or the existing folder above it, is not a writable folder.
    """
    folder = Path(folder)
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--output: {existing} is not a writable folder.\n  fix: choose another --output")
    return folder


def detection_features(frames: Frames, detections: Boxes, embed: Embed, *, batch: int) -> NDArray[np.float32]:
    """Extract the features of detections, in batches across frames.

    Args:
        frames: frames of all detections.
        detections: detections; parts outside a frame are cut off.
        embed: function from crops to features, e.g. ``embedder(predictor)``.
        batch: largest number of crops of a call, at least 1.

    Returns:
        (N, D) float32; NaN for boxes outside their frame, which a warning counts.

    Raises:
        DataError: if all boxes are outside their frames; the message names the first line. See also ``Frames.read``.
    """
    corners = np.array([_corners(box) for box in detections.boxes])
    warn_of_small_boxes(corners, str(detections.path), lambda row: f"line {detections.lines[row]}")
    features: list[NDArray[np.float32]] = []
    crops: list[Frame] = []
    rows: list[int] = []
    outside: list[str] = []
    bar = ProgressBar(len(detections), "extracting features")
    try:
        for number, frame in frames.read(np.unique(detections.frames).tolist()):
            height, width = frame.shape[:2]
            for row in np.flatnonzero(detections.frames == number).tolist():
                clipped = clip_box(corners[row].tolist(), width, height)
                if clipped is None:
                    box = ",".join(f"{value:g}" for value in detections.boxes[row])
                    outside.append(f"line {detections.lines[row]}: {box} in {width} x {height} pixels")
                    bar.update(bar.done + 1)
                    continue
                left, top, right, bottom = clipped
                crops.append(frame[top:bottom, left:right].copy())
                rows.append(row)
            while len(crops) >= batch:
                features.append(embed(crops[:batch]))
                crops = crops[batch:]
                bar.update(bar.done + batch)
        if crops:
            features.append(embed(crops))
    finally:
        bar.close()
    if outside:
        message = (
            f"{detections.path}: boxes outside their frames or smaller than a pixel: {len(outside)} of "
            f"{len(detections)}; the first: {outside[0]}"
        )
        fix = "columns are left,top,width,height in pixels of the frame"
        if not features:
            raise DataError(f"{message}\n  fix: {fix}")
        logger.warning("%s\n  they are tracked by motion only\n  fix: %s", message, fix)
    matrix = np.concatenate(features)
    result = np.full((len(detections), matrix.shape[1]), np.nan, dtype=np.float32)
    result[rows] = matrix
    return result


def _corners(box: NDArray[np.float64]) -> list[float]:
    """Return left, top, right and bottom of a box (4,) left, top, width and height."""
    return [*box[:2].tolist(), *(box[:2] + box[2:]).tolist()]


def track(
    detections: Boxes, features: NDArray[np.float32] | None = None, options: TrackerOptions | None = None
) -> Boxes:
    """Associate detections to tracks.

    Args:
        detections: detections.
        features: (N, D) features of the detections. Default: None, motion only.
        options: options of the tracker.

    Returns:
        Detections that belong to a confirmed track, with the number of the track, from 1, as id.
    """
    tracker = Tracker(options)
    numbers = np.full(len(detections), -1, dtype=np.int64)
    none = None if features is None else features[:0]
    frames, starts = np.unique(detections.frames, return_index=True)
    bounds = [*starts.tolist(), len(detections)]
    for gap, start, end in zip(np.diff(frames, prepend=0).tolist(), bounds[:-1], bounds[1:], strict=True):
        for _ in range(min(gap - 1, tracker.options.max_age + 1)):
            tracker.update(detections.boxes[:0], none)  # no track outlives more frames without a detection
        rows = slice(start, end)
        numbers[rows] = tracker.update(detections.boxes[rows], None if features is None else features[rows])
    names = {number: name for name, number in enumerate(tracker.confirmed, start=1)}
    ids = np.array([names.get(number, -1) for number in numbers.tolist()], dtype=np.int64)
    arrays = (detections.lines, detections.frames, ids, detections.boxes, detections.confidences)
    return Boxes(detections.path, *arrays).select(ids > 0)


def write_csv(path: Path, tracks: Boxes) -> None:
    """Write ``frame,track,left,top,width,height,confidence,line``; line is that of the detection in its file.

    Raises:
        WriteError: if the file cannot be written.
    """
    rows: list[list[Any]] = [["frame", "track", "left", "top", "width", "height", "confidence", "line"]]
    for row in range(len(tracks)):
        box = [f"{value:g}" for value in tracks.boxes[row]]
        confidence = f"{tracks.confidences[row]:g}"
        rows.append([tracks.frames[row], tracks.ids[row], *box, confidence, tracks.lines[row]])
    files.write_csv(path, rows)


def write_sheet(path: Path, frames: Iterable[tuple[int, Frame]], tracks: Boxes) -> None:
    """Write a PNG with one row of up to 12 crops, at even intervals of time, for each of the 40 longest tracks.

    Args:
        path: PNG file.
        frames: number and pixels of the frames, at least those that ``sheet_rows`` selects.
        tracks: tracks.

    Raises:
        WriteError: if the file cannot be written.
    """
    width, height, gap, line = 48, 96, 4, 14
    shown = sheet_rows(tracks)
    sheet = Image.new("RGB", (_SHEET_COLUMNS * (width + gap) + gap, len(shown) * (height + gap + line) + gap), "white")
    draw = ImageDraw.Draw(sheet)
    cells = {
        row: (line_number, column)
        for line_number, track_rows in enumerate(shown)
        for column, row in enumerate(track_rows)
    }
    for number, frame in frames:
        for row in sorted(set(np.flatnonzero(tracks.frames == number).tolist()) & cells.keys()):
            line_number, column = cells[row]
            corners = clip_box(_corners(tracks.boxes[row]), frame.shape[1], frame.shape[0])
            if corners:
                left, top, right, bottom = corners
                crop = ImageOps.contain(Image.fromarray(frame[top:bottom, left:right]), (width, height))
                corner = (gap + column * (width + gap), gap + line + line_number * (height + gap + line))
                sheet.paste(crop, corner)
    for line_number, track_rows in enumerate(shown):
        number = int(tracks.ids[track_rows[0]])
        top = gap + line_number * (height + gap + line)
        draw.rectangle((gap, top + 1, gap + line - 4, top + line - 3), fill=track_color(number))
        total = int((tracks.ids == number).sum())
        first, final = (int(tracks.frames[track_rows[index]]) for index in (0, -1))
        text = f"track {number}: {plural(total, 'detection')}, frames {first} to {final}"
        draw.text((gap + line, top), text, fill="black", font=load_font(None, 11))
    write_atomically(path, lambda file: sheet.save(file, format="PNG"))


def sheet_rows(tracks: Boxes) -> list[list[int]]:
    """Select the detections of a contact sheet: those of each shown track; see ``write_sheet``."""
    numbers, counts = np.unique(tracks.ids, return_counts=True)
    shown = sorted(numbers[np.argsort(-counts, kind="stable")[:_SHEET_ROWS]].tolist())
    members = (np.flatnonzero(tracks.ids == number) for number in shown)
    return [
        rows[np.linspace(0, len(rows) - 1, min(_SHEET_COLUMNS, len(rows))).astype(int)].tolist() for rows in members
    ]
