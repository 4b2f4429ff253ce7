"""One picture: a person in front of a scene, perhaps behind something, in a box that a detector might have drawn."""

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from fastamp.demo.camera import Camera, expose, make_camera
from fastamp.demo.figure import draw_person
from fastamp.demo.pose import draw_pose
from fastamp.demo.scene import crop_scene, paint_scene
from fastamp.demo.wardrobe import Appearance, draw_appearance

# Figures are painted this many times larger and averaged down, which smooths their edges.
_SUPERSAMPLING = 3

_POLE_COLOURS = ((72, 74, 78), (150, 148, 142), (56, 70, 60), (104, 84, 74), (60, 66, 82))


@lru_cache(maxsize=32)
def _camera_and_scene(index: int, seed: int, width: int, height: int) -> tuple[Camera, np.ndarray]:
    """Return camera ``index`` and its empty scene, painted once per process."""
    camera = make_camera(index, seed)
    return camera, paint_scene(camera, index, seed, width, height)


def draw_picture(
    rng: np.random.Generator,
    person: Appearance | None,
    camera_index: int,
    sequence: int,
    *,
    seed: int,
    image_size: tuple[int, int],
    bad_box: bool = False,
) -> Image.Image:
    """Return one picture of ``person`` as a camera sees it.

    Args:
        rng: owned generator of this picture; it decides pose, box, occlusion, light and noise.
        person: who is in the box; None for a false alarm of the detector, a box with nobody or half a passer-by.
        camera_index: 0, 1, ...
        sequence: 1, 2, ..., the hour of the day.
        seed: seed of the data set, which decides the scenes.
        image_size: height and width in pixels.
        bad_box: whether the box misses most of the person, as a junk image's does.

    Returns:
        RGB image of ``image_size``.
    """
    height, width = image_size
    camera, scene = _camera_and_scene(camera_index, seed, width, height)
    background = crop_scene(rng, scene, camera, width, height)

    canvas = Image.new("RGBA", (width * _SUPERSAMPLING, height * _SUPERSAMPLING))
    tall = height * _SUPERSAMPLING * camera.person_height * rng.uniform(0.93, 1.07)
    foot_x = width * _SUPERSAMPLING * (0.5 + rng.uniform(-0.07, 0.07))
    foot_y = height * _SUPERSAMPLING * (0.965 + rng.uniform(-0.03, 0.03))
    if person is None:
        foot_x += width * _SUPERSAMPLING * rng.choice((-0.6, 0.6))
    if bad_box:
        foot_x += width * _SUPERSAMPLING * rng.choice((-0.45, 0.45))
        foot_y += height * _SUPERSAMPLING * rng.choice((-0.5, 0.4))

    if rng.random() < 0.09:
        _passer_by(rng, canvas, camera, foot_x, foot_y - 0.06 * tall, tall * 0.92)
    if person is not None:
        yaw = rng.choice(camera.yaws) + rng.normal(0, 0.3)
        draw_person(canvas, person, draw_pose(rng, yaw, camera.pitch), (foot_x, foot_y), tall)
    elif rng.random() < 0.75:
        _passer_by(rng, canvas, camera, foot_x, foot_y, tall)
    if rng.random() < 0.13:
        _occluder(rng, canvas, camera, foot_x, foot_y, tall)

    ground_shadow = (foot_x / _SUPERSAMPLING, foot_y / _SUPERSAMPLING, tall / _SUPERSAMPLING)
    picture = _composed(rng, background, canvas, ground_shadow)
    return expose(rng, picture, camera, sequence)


def _passer_by(
    rng: np.random.Generator, canvas: Image.Image, camera: Camera, foot_x: float, foot_y: float, tall: float
) -> None:
    """Paint a stranger beside the place where a person stands."""
    aside = rng.uniform(0.25, 0.38) * rng.choice((-1.0, 1.0)) * tall
    pose = draw_pose(rng, rng.choice(camera.yaws) + rng.normal(0, 0.4), camera.pitch)
    draw_person(canvas, draw_appearance(rng), pose, (foot_x + aside, foot_y), tall)


def _occluder(
    rng: np.random.Generator, canvas: Image.Image, camera: Camera, foot_x: float, foot_y: float, tall: float
) -> None:
    """Paint something between the camera and the person: a stranger, a pole, a bin or a hedge."""
    brush = ImageDraw.Draw(canvas)
    kind = rng.choice(("stranger", "pole", "bin", "hedge"))
    if kind == "stranger":
        _passer_by(rng, canvas, camera, foot_x, foot_y + 0.07 * tall, tall)
    elif kind == "pole":
        left = foot_x + rng.uniform(-0.17, 0.13) * tall
        colour = _POLE_COLOURS[rng.integers(len(_POLE_COLOURS))]
        wide = rng.uniform(0.025, 0.05) * tall
        brush.rectangle((left, 0, left + wide, canvas.height), fill=colour)
        shine = tuple(min(255, value + 40) for value in colour)
        brush.rectangle((left + wide * 0.25, 0, left + wide * 0.45, canvas.height), fill=shine)
    elif kind == "bin":
        left, top = foot_x + rng.uniform(-0.22, 0.05) * tall, foot_y - rng.uniform(0.12, 0.25) * tall
        colour = _POLE_COLOURS[rng.integers(len(_POLE_COLOURS))]
        brush.rounded_rectangle((left, top, left + 0.19 * tall, canvas.height + 20), radius=0.02 * tall, fill=colour)
        dark = tuple(value * 2 // 3 for value in colour)
        brush.rectangle((left, top, left + 0.19 * tall, top + 0.03 * tall), fill=dark)
    else:
        top = foot_y - rng.uniform(0.1, 0.24) * tall
        for _ in range(60):
            x, y = rng.uniform(0, canvas.width), top + rng.uniform(0, 0.4) * tall
            radius, green = rng.uniform(0.025, 0.06) * tall, int(rng.uniform(62, 140))
            fill = (int(green * 0.7), green, int(green * 0.5))
            brush.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)


def _composed(
    rng: np.random.Generator, background: np.ndarray, canvas: Image.Image, shadow: tuple[float, float, float]
) -> np.ndarray:
    """Return the (H, W, 3) float32 picture: background, shadow on the ground, and the rounded, creased figures."""
    height, width = background.shape[:2]
    layer = np.asarray(canvas.reduce(_SUPERSAMPLING), dtype=np.float32)
    colour, alpha = layer[:, :, :3], layer[:, :, 3:] / 255

    x, y, tall = shadow
    columns = (np.arange(width, dtype=np.float32) - np.float32(x + 0.05 * tall * rng.uniform(-1, 1))) / (0.2 * tall)
    rows = (np.arange(height, dtype=np.float32) - np.float32(y)) / (0.045 * tall)
    darkness = np.exp(-(columns[None, :, None] ** 2) - rows[:, None, None] ** 2) * np.float32(0.5)

    # Light from one side: the slope of the blurred silhouette stands in for the slope of the body's surface.
    soft = Image.fromarray(layer[:, :, 3].astype(np.uint8)).filter(ImageFilter.GaussianBlur(height / 40))
    body = np.asarray(soft, dtype=np.float32) / 255
    slope = np.gradient(body, axis=1) * height / 128
    angle = rng.uniform(0, math.pi)
    lit = 0.78 + 0.25 * body + np.float32(2.2 * math.cos(angle)) * slope
    creases = rng.standard_normal((height // 7, width // 5), dtype=np.float32)
    creases = np.asarray(Image.fromarray(creases).resize((width, height), Image.Resampling.BICUBIC))
    lit = np.clip(lit * (1 + 0.045 * creases), 0.45, 1.35)[:, :, None]
    return np.clip(colour * lit, 0, 255) * alpha + background * (1 - darkness) * (1 - alpha)
