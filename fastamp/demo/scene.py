"""Backgrounds of the demo cameras: shopfront, brick wall, park, plaza, hall and parking lot at night."""

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from fastamp.demo.camera import Camera

# Width of a scene in boxes. It is two boxes high, and the wall meets the ground halfway down.
_SCENE_BOXES = 8
# Scenes are less saturated than clothes: fraction of gray that is blended in.
_SCENE_DESATURATION = 0.45


def paint_scene(camera: Camera, index: int, seed: int, width: int, height: int) -> np.ndarray:
    """Paint the empty scene of camera ``index``.

    Args:
        camera: camera; its ``scene`` is painted in neutral light.
        index: camera index, which determines the details together with ``seed``.
        seed: seed of the dataset.
        width, height: size of a person's box in pixels.

    Returns:
        (2 height, 8 width, 3) uint8; the wall meets the ground in row ``height``.
    """
    rng = np.random.default_rng([seed, 0, index])
    size = (_SCENE_BOXES * width, 2 * height)
    image = Image.new("RGB", size, (150, 148, 145))
    _PAINTERS[camera.scene](image, ImageDraw.Draw(image), rng, height)
    image = image.filter(ImageFilter.GaussianBlur(height / 128))
    image = Image.blend(image, image.convert("L").convert("RGB"), _SCENE_DESATURATION)
    grain = rng.normal(0, 1, (size[1], size[0], 1)).astype(np.float32) * 3 + _clouds(rng, size) * 9
    return np.clip(np.asarray(image, dtype=np.float32) + grain, 0, 255).astype(np.uint8)


def crop_scene(rng: np.random.Generator, scene: np.ndarray, camera: Camera, width: int, height: int) -> np.ndarray:
    """Crop a random (height, width, 3) float32 view, in which the wall ends at the camera's ``wall_foot``."""
    left = int(rng.integers(scene.shape[1] - width + 1))
    wall_foot = camera.wall_foot + rng.uniform(-0.1, 0.1)
    top = int(np.clip(height * (1 - wall_foot), 0, scene.shape[0] - height))
    return scene[top : top + height, left : left + width].astype(np.float32)


def paint_ground(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Paint a (height, width, 3) float32 view of the ground from above: asphalt, paving or grass, with a marking."""
    base = np.array(((112, 112, 116), (168, 160, 148), (96, 122, 74))[rng.integers(3)], dtype=np.float32)
    image = Image.new("RGB", (width, height), tuple(base.astype(int).tolist()))
    draw = ImageDraw.Draw(image)
    if base[0] > 150:
        for x in range(int(rng.integers(12)), width, 14):
            draw.line((x, 0, x, height), fill=(148, 140, 128))
        for y in range(int(rng.integers(12)), height, 14):
            draw.line((0, y, width, y), fill=(148, 140, 128))
    if rng.random() < 0.5:
        start, slant = rng.uniform(0, width), rng.uniform(-0.8, 0.8) * width
        draw.line((start, 0, start + slant, height), fill=(222, 220, 212), width=max(2, width // 12))
    grain = rng.normal(0, 3, (height, width, 1)).astype(np.float32) + _clouds(rng, (width, height)) * 9
    return np.clip(np.asarray(image, dtype=np.float32) + grain, 0, 255)


def _clouds(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return (H, W, 1) float32 smooth noise of about unit variance, at two scales."""
    total = np.zeros((size[1], size[0]), dtype=np.float32)
    for cell in (48, 12):
        coarse = rng.standard_normal((size[1] // cell + 2, size[0] // cell + 2), dtype=np.float32)
        total += np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)) * 0.6
    return total[:, :, None]


# -- scenes: the wall meets the ground halfway down the image; unit is the height of a person -----------------------


def _ground(draw: ImageDraw.ImageDraw, size: tuple[int, int], color: tuple, line: tuple | None, unit: int) -> None:
    """Paint the ground; if ``line`` is a color, also paint the joints of paving slabs in perspective."""
    width, height = size
    foot = height // 2
    draw.rectangle((0, foot, width, height), fill=color)
    if line is None:
        return
    row: float = foot
    step = unit * 0.05
    while row < height:
        draw.line((0, row, width, row), fill=line, width=max(1, unit // 100))
        row, step = row + step, step * 1.25
    for x in range(-width, 2 * width, max(8, unit // 3)):
        draw.line((x, foot, (x - width / 2) * 1.7 + width / 2, height), fill=line, width=max(1, unit // 100))


def _shopfront(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator, unit: int) -> None:
    width, height = image.size
    foot = height // 2
    draw.rectangle((0, 0, width, foot), fill=(172, 160, 142))
    x = 0
    while x < width:
        span = int(unit * rng.uniform(0.5, 0.9))
        tint = tuple(int(v) for v in rng.uniform(50, 110, 3))
        draw.rectangle((x, foot - int(unit * 0.75), x + span, foot - int(unit * 0.08)), fill=tint)
        for _ in range(5):
            left, low = x + rng.uniform(0, 0.8) * span, foot - unit * rng.uniform(0.1, 0.3)
            box = (left, low - unit * rng.uniform(0.1, 0.35), left + span * rng.uniform(0.08, 0.2), low)
            draw.rectangle(box, fill=tuple(int(v) for v in rng.uniform(60, 240, 3)))
        awning = tuple(int(v) for v in rng.uniform(60, 220, 3))
        for stripe in range(6):
            left = x + stripe * span // 6
            fill = awning if stripe % 2 else (226, 222, 214)
            draw.rectangle((left, foot - int(unit * 0.9), left + span // 6, foot - int(unit * 0.76)), fill=fill)
        draw.rectangle((x + span, foot - unit, x + span + unit // 14, foot), fill=(104, 92, 80))
        x += span + unit // 14
    _ground(draw, image.size, (168, 164, 158), (140, 136, 130), unit)


def _brick(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator, unit: int) -> None:
    width, height = image.size
    foot = height // 2
    draw.rectangle((0, 0, width, foot), fill=(176, 164, 152))
    course, length = max(3, unit // 18), max(6, unit // 8)
    for row, y in enumerate(range(foot, -course, -course)):
        for x in range(-(row % 2) * length // 2, width, length):
            red = int(rng.uniform(128, 176))
            box = (x + 1, y - course + 1, x + length - 1, y - 1)
            draw.rectangle(box, fill=(red, int(red * 0.6), int(red * 0.5)))
    for x in range(unit // 2, width, unit * 2):
        draw.rectangle((x, foot - int(unit * 0.85), x + unit // 2, foot), fill=(62, 74, 84))
        draw.rectangle((x + unit // 20, foot - int(unit * 0.8), x + unit // 2 - unit // 20, foot), fill=(84, 96, 104))
    _ground(draw, image.size, (126, 126, 128), (104, 104, 108), unit)


def _park(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator, unit: int) -> None:
    width, height = image.size
    foot = height // 2
    draw.rectangle((0, 0, width, foot), fill=(92, 122, 78))
    for _ in range(900):
        x, y, r = rng.uniform(0, width), rng.uniform(-unit * 0.1, foot), unit * rng.uniform(0.02, 0.09)
        green = int(rng.uniform(64, 168))
        draw.ellipse((x - r, y - r, x + r, y + r), fill=(int(green * 0.72), green, int(green * 0.5)))
    for x in rng.uniform(0, width, 7):
        draw.rectangle((x, 0, x + unit * 0.11, foot), fill=(88, 70, 54))
    draw.rectangle((0, foot, width, height), fill=(112, 146, 82))
    for _ in range(1500):
        x, y = rng.uniform(0, width), rng.uniform(foot, height)
        green = int(rng.uniform(96, 164))
        draw.line((x, y, x + 1, y - unit * 0.03), fill=(int(green * 0.76), green, int(green * 0.5)))
    draw.rectangle((0, foot + int(unit * 0.28), width, foot + int(unit * 0.8)), fill=(190, 178, 156))


def _plaza(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator, unit: int) -> None:
    width, height = image.size
    draw.rectangle((0, 0, width, height), fill=(158, 158, 160))
    _ground(draw, image.size, (158, 158, 160), (138, 138, 142), unit)
    for x in range(unit, width, unit * 2):
        for stripe in range(6):
            left, shift = x + stripe * unit * 0.17, unit * 0.5
            corners = [(left, height // 2), (left + unit * 0.08, height // 2)]
            corners += [(left + unit * 0.08 - shift, height), (left - shift - unit * 0.02, height)]
            draw.polygon(corners, fill=(216, 214, 208))
    for _ in range(30):
        middle, y, r = rng.uniform(0, width), rng.uniform(height * 0.5, height), unit * rng.uniform(0.01, 0.05)
        draw.ellipse((middle - 2 * r, y - r, middle + 2 * r, y + r), fill=(128, 128, 130))


def _hall(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator, unit: int) -> None:
    width, height = image.size
    foot = height // 2
    draw.rectangle((0, 0, width, foot), fill=(206, 202, 190))
    for x in range(0, width, unit):
        draw.rectangle((x, 0, x + int(unit * 0.22), foot), fill=(178, 176, 168))
        draw.rectangle((x + int(unit * 0.16), 0, x + int(unit * 0.22), foot), fill=(150, 148, 142))
        poster = tuple(int(v) for v in rng.uniform(70, 220, 3))
        draw.rectangle((x + unit * 0.4, foot - unit * 0.75, x + unit * 0.75, foot - unit * 0.25), fill=poster)
        draw.rectangle((x + unit * 0.45, foot - unit * 0.6, x + unit * 0.7, foot - unit * 0.5), fill=(236, 232, 226))
    _ground(draw, image.size, (196, 190, 178), (170, 164, 154), unit)
    for x in range(unit // 2, width, unit):
        draw.ellipse((x, foot + unit * 0.3, x + unit * 0.4, foot + unit * 0.5), fill=(222, 218, 208))


def _night(image: Image.Image, draw: ImageDraw.ImageDraw, rng: np.random.Generator, unit: int) -> None:
    width, height = image.size
    foot = height // 2
    draw.rectangle((0, 0, width, foot), fill=(92, 94, 100))
    for x in range(0, width, max(6, unit // 12)):
        draw.line((x, foot - unit * 0.7, x, foot), fill=(58, 60, 66), width=max(1, unit // 60))
    draw.rectangle((0, foot - int(unit * 0.72), width, foot - int(unit * 0.68)), fill=(60, 62, 68))
    for x in rng.uniform(0, width, 5):
        tint = tuple(int(v) for v in rng.uniform(40, 150, 3))
        box = (x, foot - unit * 0.42, x + unit * 1.1, foot - unit * 0.04)
        draw.rounded_rectangle(box, radius=unit * 0.12, fill=tint)
        draw.rounded_rectangle(
            (x + unit * 0.2, foot - unit * 0.4, x + unit * 0.9, foot - unit * 0.25), 4, fill=(44, 48, 56)
        )
        for wheel in (0.15, 0.75):
            left = x + unit * wheel
            draw.ellipse((left, foot - unit * 0.14, left + unit * 0.2, foot + unit * 0.04), fill=(26, 26, 28))
    _ground(draw, image.size, (98, 98, 102), None, unit)
    draw.rectangle((0, foot + int(unit * 0.06), width, foot + int(unit * 0.1)), fill=(150, 148, 140))


_PAINTERS = {
    "shopfront": _shopfront,
    "brick": _brick,
    "park": _park,
    "plaza": _plaza,
    "hall": _hall,
    "night": _night,
}
