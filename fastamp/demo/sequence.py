"""Generate a tracking sequence: demo pedestrians who walk to and fro behind pillars and in front of each other.

The layout is that of the MOT Challenge: ``img1/000001.jpg``, ``det/det.txt``, ``gt/gt.txt`` and ``seqinfo.ini``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fastamp.demo.camera import expose, make_camera
from fastamp.demo.figure import draw_person
from fastamp.demo.generate import has_all_images, write_dataset
from fastamp.demo.picture import SUPERSAMPLING, composite
from fastamp.demo.pose import Gait, draw_gait, walking_pose
from fastamp.demo.scene import paint_scene
from fastamp.demo.wardrobe import Appearance, draw_people

# Increment it with every change of the images.
SEQUENCE_VERSION = "1"
FRAME_SIZE = (256, 512)
"""Height and width of the frames in pixels."""

_UNIT = 128  # height and width of the scene are 2 and 4 units
_PILLARS = (130, 300)  # left edges
_PILLAR_WIDTH, _PILLAR_FOOT = 54, 232
_TALL = 104
_MIN_VISIBLE = 0.3  # visible fraction of a person that is detected
_MISSED, _FALSE = 0.03, 0.1  # probability of a missed person, and of a false detection in a frame


@dataclass
class _Walker:
    """Person with a path: position and state in the current frame."""

    pid: int
    person: Appearance
    gait: Gait
    x: float
    foot: float
    speed: float
    phase: float
    pause: int = 0
    behind: bool = False

    def step(self, rng: np.random.Generator) -> None:
        """Advance by one frame. A person may stop or turn back behind a pillar, and turns back at the edges."""
        self.phase += 0.35
        if self.pause:
            self.pause -= 1
            return
        self.x += self.speed
        hidden = any(abs(self.x - left - _PILLAR_WIDTH / 2) < 8 for left in _PILLARS) and self.foot < _PILLAR_FOOT
        if hidden and not self.behind:
            self.pause = int(rng.integers(0, 16))
            self.speed = float(rng.uniform(2.2, 4.2) * math.copysign(1, self.speed) * rng.choice((-1, 1)))
        self.behind = hidden
        if not 24 < self.x < FRAME_SIZE[1] - 24:
            self.x = min(max(self.x, 24), FRAME_SIZE[1] - 24)
            self.speed = -self.speed


def generate_sequence(
    folder: str | Path,
    *,
    people: int = 8,
    frames: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a tracking sequence to ``folder`` unless it is complete.

    The ground truth has the visible fraction of each person; its confidence is 0 (not counted) if less than 0.3 is
    visible. Detections are the other boxes with random errors, misses and false detections. The same arguments give
    identical files for one version of NumPy and Pillow. An interrupted run leaves no sequence.

    Args:
        folder: folder of the sequence; parents are created.
        people: number of people, at least 1. Default 8.
        frames: number of frames, at least 1. Default 200.
        seed: random seed, at least 0. Default 0.
        progress: called as ``progress(frames_written, frames)``.

    Raises:
        ValueError: if an argument is out of range.
        DataError: if ``folder`` contains other files, or a demo dataset with different arguments.
    """
    if min(people, frames) < 1 or seed < 0:
        raise ValueError("at least 1 person, 1 frame and a seed of 0 are required")
    settings = {"variant": "sequence", "version": SEQUENCE_VERSION, "seed": seed, "people": people, "frames": frames}

    def write(build: Path) -> dict:
        for name in ("img1", "det", "gt"):
            (build / name).mkdir()
        _write(build, people, frames, seed, progress)
        return {}

    write_dataset(folder, settings, is_complete_sequence, write)


def is_complete_sequence(folder: str | Path) -> bool:
    """Return True if ``folder`` has as many frames of this version as its manifest states."""
    return has_all_images(folder, "img1", "frames", variant="sequence", version=SEQUENCE_VERSION)


def _write(build: Path, people: int, frames: int, seed: int, progress: Callable[[int, int], None] | None) -> None:
    """Draw the frames, and write the detections, the ground truth and ``seqinfo.ini``."""
    rng = np.random.default_rng([seed, 40])
    walkers = _walkers(rng, people)
    scene = paint_scene(make_camera(0, seed), 0, seed, FRAME_SIZE[1] // 8, _UNIT).astype(np.float32)
    detections, truth = [], []
    for number in range(1, frames + 1):
        picture, boxes = _draw(walkers, scene, seed)
        picture.save(build / f"img1/{number:06d}.jpg", quality=90)
        for walker, (box, visible) in zip(walkers, boxes, strict=True):
            counted = visible >= _MIN_VISIBLE
            truth.append(f"{number},{walker.pid},{_join(box)},{int(counted)},1,{visible:.3f}\n")
            if counted and rng.random() >= _MISSED:
                error = rng.normal(0, 0.02, 4) * (box[2], box[3], box[2], box[3])
                confidence = min(1.0, 0.6 + 0.4 * visible)
                detections.append(f"{number},-1,{_join(box + error)},{confidence:.3f},-1,-1,-1\n")
        if rng.random() < _FALSE:
            box = np.array([rng.uniform(0, 460), rng.uniform(60, 120), 40, 100])
            detections.append(f"{number},-1,{_join(box)},{rng.uniform(0.3, 0.6):.3f},-1,-1,-1\n")
        for walker in walkers:
            walker.step(rng)
        if progress is not None:
            progress(number, frames)
    (build / "det/det.txt").write_text("".join(detections), encoding="utf-8")
    (build / "gt/gt.txt").write_text("".join(truth), encoding="utf-8")
    height, width = FRAME_SIZE
    lines = ["[Sequence]", "name=demo", "imDir=img1", "frameRate=25", f"seqLength={frames}"]
    lines += [f"imWidth={width}", f"imHeight={height}", "imExt=.jpg", ""]
    (build / "seqinfo.ini").write_text("\n".join(lines), encoding="utf-8")


def _join(box: np.ndarray) -> str:
    return ",".join(f"{value:.2f}" for value in box)


def _walkers(rng: np.random.Generator, people: int) -> list[_Walker]:
    """Place people at different depths, walking in both directions."""
    depths = rng.permutation(np.linspace(160, 226, people))
    return [
        _Walker(
            pid=number + 1,
            person=person,
            gait=draw_gait(rng),
            x=float(rng.uniform(40, FRAME_SIZE[1] - 40)),
            foot=float(depths[number]),
            speed=float(rng.uniform(2.2, 4.2) * rng.choice((-1, 1))),
            phase=float(rng.uniform(0, 2 * math.pi)),
        )
        for number, person in enumerate(draw_people(rng, people, 1, 0.0))
    ]


def _draw(walkers: list[_Walker], scene: np.ndarray, seed: int) -> tuple[Image.Image, list[tuple[np.ndarray, float]]]:
    """Draw a frame; return it with the box (4,) and the visible fraction of each person."""
    height, width = FRAME_SIZE
    canvas = Image.new("RGBA", (width * SUPERSAMPLING, height * SUPERSAMPLING))
    owner = np.full(FRAME_SIZE, -1)
    boxes: dict[int, np.ndarray] = {}
    areas: dict[int, int] = {}
    for walker in sorted(walkers, key=lambda walker: walker.foot):
        layer, left, top = _draw_walker(walker)
        canvas.alpha_composite(layer, (max(left, 0), top), (max(-left, 0), 0))
        alpha = layer.getchannel("A").reduce(SUPERSAMPLING)
        inner = alpha.point(lambda value: 255 * (value > 127)).getbbox() or (0, 0, 1, 1)
        x, y = left // SUPERSAMPLING, top // SUPERSAMPLING
        boxes[walker.pid] = np.array([inner[0] + x, inner[1] + y, inner[2] - inner[0], inner[3] - inner[1]], float)
        rows, columns = np.nonzero(np.asarray(alpha) > 127)
        areas[walker.pid] = len(rows)
        inside = (columns + x >= 0) & (columns + x < width) & (rows + y >= 0) & (rows + y < height)
        owner[rows[inside] + y, columns[inside] + x] = walker.pid
    # The pillars are nearer than everybody: they hide all people behind them.
    for edge in _PILLARS:
        corners = np.array((edge, 0, edge + _PILLAR_WIDTH, _PILLAR_FOOT))
        pillar = Image.new("RGBA", tuple((corners[2:] - corners[:2]) * SUPERSAMPLING), (118, 112, 106, 255))
        canvas.alpha_composite(pillar, tuple(corners[:2] * SUPERSAMPLING))
        owner[corners[1] : corners[3], corners[0] : corners[2]] = -1
    light = np.random.default_rng([seed, 41])  # the same for all frames
    blended = composite(light, scene, canvas, (-9.0 * width, height, height))
    picture = expose(light, blended, make_camera(0, seed), 1)
    visible = {pid: float((owner == pid).sum()) / max(areas[pid], 1) for pid in boxes}
    return picture, [(boxes[walker.pid], visible[walker.pid]) for walker in walkers]


def _draw_walker(walker: _Walker) -> tuple[Image.Image, int, int]:
    """Draw a person on a transparent layer; return it with the position of its left top corner in the canvas."""
    tall = _TALL + 0.12 * (walker.foot - 160)
    width, height = int(tall * 0.9) * SUPERSAMPLING, int(tall * 1.25) * SUPERSAMPLING
    layer = Image.new("RGBA", (width, height))
    yaw = math.copysign(1.35, walker.speed)
    phase = walker.phase if not walker.pause else 0.0
    pose = walking_pose(walker.gait, phase, yaw, make_camera(0, 0).pitch)
    foot = (width / 2, height - 0.06 * tall * SUPERSAMPLING)
    draw_person(layer, walker.person, pose, foot, tall * SUPERSAMPLING)
    left = round(walker.x * SUPERSAMPLING - foot[0]) // SUPERSAMPLING * SUPERSAMPLING
    top = round(walker.foot * SUPERSAMPLING - foot[1]) // SUPERSAMPLING * SUPERSAMPLING
    return layer, left, top
