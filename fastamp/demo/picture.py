"""Draw one image: a person in front of a scene, possibly occluded, in a box of a simulated detector."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from fastamp.demo.camera import Camera, expose, expose_infrared, make_camera
from fastamp.demo.figure import draw_person
from fastamp.demo.pose import Pose, draw_pose
from fastamp.demo.scene import crop_scene, paint_ground, paint_scene
from fastamp.demo.wardrobe import Appearance, draw_appearance

# Figures are painted at this multiple of the size and averaged down for antialiasing.
SUPERSAMPLING = 3

OCCLUDERS = ("stranger", "pole", "bin", "hedge")
_POLE_COLORS = ((72, 74, 78), (150, 148, 142), (56, 70, 60), (104, 84, 74), (60, 66, 82))


@lru_cache(maxsize=32)
def _camera_and_scene(index: int, seed: int, width: int, height: int) -> tuple[Camera, np.ndarray]:
    """Return camera ``index`` and its empty scene, painted once per process."""
    camera = make_camera(index, seed)
    return camera, paint_scene(camera, index, seed, width, height)


Paint = Callable[[Image.Image], None]
"""Function that paints one object onto a canvas."""


@dataclass(frozen=True)
class Composition:
    """Content of an image before light and noise. Lengths are in pixels of the canvas.

    Attributes:
        background: (H, W, 3) float32, visible part of the scene.
        foot: (x, y) of the ground point between the feet.
        tall: pixels from sole to crown for a person of height 1.
        pose: pose of the person; None for an empty box.
        passer_by: True if another person is behind the main person, or partly in an empty box.
        occluder: object in front of the person: ``"none"`` or one of ``OCCLUDERS``.
        layers: operations that paint on the background, from far to near.
    """

    background: np.ndarray
    foot: tuple[float, float]
    tall: float
    pose: Pose | None
    passer_by: bool
    occluder: str
    layers: tuple[Paint, ...]


@dataclass(frozen=True, kw_only=True)
class Shot:
    """Options of an image; the defaults are those of the dataset ``Demo``. Lengths are fractions of the box.

    Attributes:
        pose: pose of the person. Default: random.
        shift: displacement of the person to the right and down. Default: random.
        background: seed of the view of the scene, the same for the frames of a tracklet. Default: random.
        occluder: ``"none"`` or one of ``OCCLUDERS``. Default: random.
        infrared: if True, the camera is a near-infrared camera. Default False.
        aerial: if True, the ground is seen from above, the person is small and turned at random, and casts a shadow;
            ``pose.pitch`` is steep. Default False.
    """

    pose: Pose | None = None
    shift: tuple[float, float] | None = None
    background: int | None = None
    occluder: str | None = None
    infrared: bool = False
    aerial: bool = False


def draw_picture(
    rng: np.random.Generator,
    person: Appearance | None,
    camera_index: int,
    sequence: int,
    *,
    seed: int,
    image_size: tuple[int, int],
    bad_box: bool = False,
    shot: Shot | None = None,
) -> Image.Image:
    """Draw an image of ``person`` as seen by a camera.

    Args:
        rng: generator of this image: pose, box, occlusion, light and noise.
        person: person in the box; None for a false detection, which is empty or shows part of a passer-by.
        camera_index: camera, from 0.
        sequence: hour of the day, from 1.
        seed: seed of the dataset, which determines the scenes.
        image_size: height and width in pixels.
        bad_box: if True, most of the person is outside of the box, as in images of identity -1. Default False.
        shot: further options. Default: ``Shot()``.

    Returns:
        RGB image of ``image_size``.
    """
    height, width = image_size
    shot = shot or Shot()
    picture = compose(rng, person, camera_index, seed=seed, image_size=image_size, bad_box=bad_box, shot=shot)
    canvas = Image.new("RGBA", (width * SUPERSAMPLING, height * SUPERSAMPLING))
    for paint in picture.layers:
        paint(canvas)
    background = picture.background
    if shot.aerial:
        canvas = canvas.rotate(rng.uniform(-40, 40), Image.Resampling.BILINEAR)
        background = _cast_shadow(rng, background, canvas)
    foot_x, foot_y = picture.foot
    ground_shadow = (foot_x / SUPERSAMPLING, foot_y / SUPERSAMPLING, picture.tall / SUPERSAMPLING)
    if shot.aerial:
        ground_shadow = (-9 * width, foot_y / SUPERSAMPLING, picture.tall / SUPERSAMPLING)
    blended = composite(rng, background, canvas, ground_shadow)
    if shot.infrared:
        return expose_infrared(rng, blended)
    return expose(rng, blended, make_camera(camera_index, seed), sequence)


def compose(
    rng: np.random.Generator,
    person: Appearance | None,
    camera_index: int,
    *,
    seed: int,
    image_size: tuple[int, int],
    bad_box: bool = False,
    shot: Shot | None = None,
) -> Composition:
    """Return the composition of an image without painting it; see ``draw_picture``."""
    height, width = image_size
    shot = shot or Shot()
    camera, scene = _camera_and_scene(camera_index, seed, width, height)
    view = rng if shot.background is None else np.random.default_rng([seed, 2, shot.background])
    background = paint_ground(view, width, height) if shot.aerial else crop_scene(view, scene, camera, width, height)

    canvas_size = (width * SUPERSAMPLING, height * SUPERSAMPLING)
    tall = height * SUPERSAMPLING * camera.person_height * rng.uniform(0.93, 1.07)
    foot_x = width * SUPERSAMPLING * (0.5 + rng.uniform(-0.07, 0.07))
    foot_y = height * SUPERSAMPLING * (0.965 + rng.uniform(-0.03, 0.03))
    if person is None:
        foot_x += width * SUPERSAMPLING * rng.choice((-0.6, 0.6))
    if shot.shift is not None:
        foot_x = width * SUPERSAMPLING * (0.5 + shot.shift[0])
        foot_y = height * SUPERSAMPLING * (0.965 + shot.shift[1])
    if shot.aerial and shot.pose is not None:
        tall *= 0.8
        foot_y = height * SUPERSAMPLING / 2 + 0.5 * tall * math.cos(shot.pose.pitch)
    if bad_box:
        foot_x += width * SUPERSAMPLING * rng.choice((-0.45, 0.45))
        foot_y += height * SUPERSAMPLING * rng.choice((-0.5, 0.4))

    layers: list[Paint] = []
    if rng.random() < 0.09 and not shot.aerial:
        layers.append(_passer_by(rng, camera, foot_x, foot_y - 0.06 * tall, tall * 0.92))
    passer_by, pose, occluder = bool(layers), None, "none"
    if person is not None:
        yaw = rng.choice(camera.yaws) + rng.normal(0, 0.3)
        pose = shot.pose or draw_pose(rng, yaw, camera.pitch)
        layers.append(partial(draw_person, person=person, pose=pose, foot=(foot_x, foot_y), height=tall))
    elif rng.random() < 0.75:
        passer_by = True
        layers.append(_passer_by(rng, camera, foot_x, foot_y, tall))
    if shot.occluder is not None:
        occluder = shot.occluder
    elif rng.random() < 0.13:
        occluder = str(rng.choice(OCCLUDERS))
    if occluder != "none":
        layers += _occluder(rng, occluder, canvas_size, camera, foot_x, foot_y, tall)
    return Composition(background, (foot_x, foot_y), tall, pose, passer_by, occluder, tuple(layers))


def _passer_by(rng: np.random.Generator, camera: Camera, foot_x: float, foot_y: float, tall: float) -> Paint:
    """Return a random person next to the position of the main person."""
    offset = rng.uniform(0.25, 0.38) * rng.choice((-1.0, 1.0)) * tall
    pose = draw_pose(rng, rng.choice(camera.yaws) + rng.normal(0, 0.4), camera.pitch)
    return partial(draw_person, person=draw_appearance(rng), pose=pose, foot=(foot_x + offset, foot_y), height=tall)


def _occluder(
    rng: np.random.Generator,
    kind: str,
    canvas_size: tuple[int, int],
    camera: Camera,
    foot_x: float,
    foot_y: float,
    tall: float,
) -> list[Paint]:
    """Return an object between camera and person: another person, a pole, a bin or a hedge."""
    width, height = canvas_size
    if kind == "stranger":
        return [_passer_by(rng, camera, foot_x, foot_y + 0.07 * tall, tall)]
    if kind == "pole":
        left = foot_x + rng.uniform(-0.17, 0.13) * tall
        color = _POLE_COLORS[rng.integers(len(_POLE_COLORS))]
        wide = rng.uniform(0.025, 0.05) * tall
        shine = tuple(min(255, value + 40) for value in color)
        return [
            _shape(ImageDraw.ImageDraw.rectangle, (left, 0, left + wide, height), fill=color),
            _shape(ImageDraw.ImageDraw.rectangle, (left + wide * 0.25, 0, left + wide * 0.45, height), fill=shine),
        ]
    if kind == "bin":
        left, top = foot_x + rng.uniform(-0.22, 0.05) * tall, foot_y - rng.uniform(0.12, 0.25) * tall
        color = _POLE_COLORS[rng.integers(len(_POLE_COLORS))]
        dark = tuple(value * 2 // 3 for value in color)
        box = (left, top, left + 0.19 * tall, max(top, height + 20))
        return [
            _shape(ImageDraw.ImageDraw.rounded_rectangle, box, radius=0.02 * tall, fill=color),
            _shape(ImageDraw.ImageDraw.rectangle, (left, top, left + 0.19 * tall, top + 0.03 * tall), fill=dark),
        ]
    top = foot_y - rng.uniform(0.1, 0.24) * tall
    leaves = []
    for _ in range(60):
        x, y = rng.uniform(0, width), top + rng.uniform(0, 0.4) * tall
        radius, green = rng.uniform(0.025, 0.06) * tall, int(rng.uniform(62, 140))
        fill = (int(green * 0.7), green, int(green * 0.5))
        leaves.append(_shape(ImageDraw.ImageDraw.ellipse, (x - radius, y - radius, x + radius, y + radius), fill=fill))
    return leaves


def _shape(draw: Callable[..., None], box: tuple[float, float, float, float], **options: Any) -> Paint:
    """Return a function that draws a shape with a method of ``PIL.ImageDraw.ImageDraw``."""
    return lambda canvas: draw(ImageDraw.Draw(canvas), box, **options)


def _cast_shadow(rng: np.random.Generator, background: np.ndarray, canvas: Image.Image) -> np.ndarray:
    """Darken the ground by the silhouette on the canvas, shifted and sheared away from a low sun."""
    height = canvas.height
    lean, fall = rng.uniform(0.5, 1.0) * rng.choice((-1.0, 1.0)), rng.uniform(0.05, 0.2)
    matrix = (1, -lean, lean * height * 0.72, 0, 1 / (0.7 + fall), -0.3 * height / 2)
    silhouette = canvas.getchannel("A").transform(canvas.size, Image.Transform.AFFINE, matrix)
    mask = np.asarray(silhouette.reduce(SUPERSAMPLING).filter(ImageFilter.GaussianBlur(0.8)), dtype=np.float32) / 255
    return background * (1 - np.float32(0.5) * mask[:, :, None])


def composite(
    rng: np.random.Generator, background: np.ndarray, canvas: Image.Image, shadow: tuple[float, float, float]
) -> np.ndarray:
    """Blend background, shadow on the ground and shaded figures into a (H, W, 3) float32 image."""
    height, width = background.shape[:2]
    layer = np.asarray(canvas.reduce(SUPERSAMPLING), dtype=np.float32)
    color, alpha = layer[:, :, :3], layer[:, :, 3:] / 255

    x, y, tall = shadow
    columns = (np.arange(width) - (x + 0.05 * tall * rng.uniform(-1, 1))) / (0.2 * tall)
    rows = (np.arange(height) - y) / (0.045 * tall)
    darkness = np.float32(np.exp(-(columns[None, :, None] ** 2) - rows[:, None, None] ** 2) * 0.5)

    # Light from one side: the gradient of the blurred silhouette approximates the surface normal.
    soft = Image.fromarray(layer[:, :, 3].astype(np.uint8)).filter(ImageFilter.GaussianBlur(height / 40))
    body = np.asarray(soft, dtype=np.float32) / 255
    slope = np.gradient(body, axis=1) * height / 128
    angle = rng.uniform(0, math.pi)
    lit = 0.78 + 0.25 * body + np.float32(2.2 * math.cos(angle)) * slope
    creases = rng.standard_normal((height // 7, width // 5), dtype=np.float32)
    creases = np.asarray(Image.fromarray(creases).resize((width, height), Image.Resampling.BICUBIC))
    lit = np.clip(lit * (1 + 0.045 * creases), 0.45, 1.35)[:, :, None]
    return np.clip(color * lit, 0, 255) * alpha + background * (1 - darkness) * (1 - alpha)
