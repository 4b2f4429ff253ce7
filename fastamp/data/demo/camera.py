"""The demo's surveillance cameras: where each one hangs, what it sees behind people, and how it spoils a picture."""

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

# A scene is this many boxes wide, and two boxes high with the foot of the wall half-way down.
_SCENE_BOXES = 8
# Streets are greyer than clothes: how far scenes are drawn towards grey.
_SCENE_GREYING = 0.45


@dataclass(frozen=True)
class Camera:
    """One camera. Angles are in radians, colours are gains, lengths are in pixels of the final picture.

    ``wall_foot`` is where the wall meets the ground, as a share of the box height; ``yaws`` are the directions in
    which people mostly walk past; ``detail`` below 1 is the resolution lost in a distant or cheap camera, ``person_height``
    is the share of the box that a person fills, and ``jpeg`` the range of qualities it saves with.
    """

    scene: str
    pitch: float
    yaws: tuple[float, ...]
    wall_foot: float
    gain: float
    gamma: float
    cast: tuple[float, float, float]
    haze: float
    saturation: float
    blur: float
    noise: float
    detail: float
    person_height: float
    jpeg: tuple[int, int]


_CAMERAS = (
    Camera(
        scene="shopfront",
        pitch=0.1,
        yaws=(0.3, -0.5, 2.8),
        wall_foot=0.62,
        gain=1.06,
        gamma=1.0,
        cast=(1.03, 1.0, 0.96),
        haze=0.01,
        saturation=1.0,
        blur=0.25,
        noise=3,
        detail=1.0,
        person_height=0.92,
        jpeg=(70, 92),
    ),
    Camera(
        scene="brick",
        pitch=0.26,
        yaws=(0.0, 3.1, 1.5),
        wall_foot=0.42,
        gain=0.93,
        gamma=1.05,
        cast=(0.94, 0.99, 1.08),
        haze=0.02,
        saturation=0.95,
        blur=0.35,
        noise=4,
        detail=0.95,
        person_height=0.9,
        jpeg=(60, 88),
    ),
    Camera(
        scene="park",
        pitch=0.18,
        yaws=(1.4, -1.4, 2.6),
        wall_foot=0.5,
        gain=1.08,
        gamma=0.95,
        cast=(0.98, 1.03, 0.96),
        haze=0.03,
        saturation=1.08,
        blur=0.3,
        noise=3,
        detail=1.0,
        person_height=0.91,
        jpeg=(60, 90),
    ),
    Camera(
        scene="plaza",
        pitch=0.36,
        yaws=(3.1, 2.6, -0.6),
        wall_foot=0.08,
        gain=1.0,
        gamma=1.0,
        cast=(1.0, 0.99, 1.03),
        haze=0.08,
        saturation=0.88,
        blur=0.45,
        noise=4,
        detail=0.9,
        person_height=0.88,
        jpeg=(50, 80),
    ),
    Camera(
        scene="hall",
        pitch=0.22,
        yaws=(0.2, -0.2, 3.0),
        wall_foot=0.48,
        gain=1.06,
        gamma=0.98,
        cast=(1.05, 1.02, 0.92),
        haze=0.02,
        saturation=1.0,
        blur=0.3,
        noise=3,
        detail=1.0,
        person_height=0.92,
        jpeg=(65, 90),
    ),
    Camera(
        scene="night",
        pitch=0.3,
        yaws=(-1.5, 1.6, 0.4),
        wall_foot=0.36,
        gain=0.84,
        gamma=0.9,
        cast=(1.08, 0.98, 0.88),
        haze=0.03,
        saturation=0.9,
        blur=0.5,
        noise=5,
        detail=0.9,
        person_height=0.9,
        jpeg=(45, 78),
    ),
)


def make_camera(index: int, seed: int) -> Camera:
    """Return camera ``index`` (0, 1, ...): six fixed ones, then the same six in another light."""
    camera = _CAMERAS[index % len(_CAMERAS)]
    if index < len(_CAMERAS):
        return camera
    rng = np.random.default_rng([seed, 1, index])
    cast = tuple(rng.uniform(0.75, 1.25, 3).tolist())
    return replace(camera, cast=cast, gain=rng.uniform(0.7, 1.15), pitch=camera.pitch * rng.uniform(0.7, 1.3))


def paint_scene(camera: Camera, index: int, seed: int, width: int, height: int) -> np.ndarray:
    """Return what camera ``index`` sees when nobody is there.

    Args:
        camera: the camera; its ``scene`` is painted, its light is not.
        index: number of the camera, which together with ``seed`` decides the details.
        seed: seed of the data set.
        width: width of one person's box in pixels.
        height: height of one person's box in pixels.

    Returns:
        (2 height, 8 width, 3) uint8; the wall meets the ground in row ``height``.
    """
    rng = np.random.default_rng([seed, 0, index])
    size = (_SCENE_BOXES * width, 2 * height)
    image = Image.new("RGB", size, (150, 148, 145))
    _PAINTERS[camera.scene](image, ImageDraw.Draw(image), rng, height)
    image = image.filter(ImageFilter.GaussianBlur(height / 128))
    image = Image.blend(image, image.convert("L").convert("RGB"), _SCENE_GREYING)
    grain = rng.normal(0, 1, (size[1], size[0], 1)).astype(np.float32) * 3 + _clouds(rng, size) * 9
    return np.clip(np.asarray(image, dtype=np.float32) + grain, 0, 255).astype(np.uint8)


def crop_scene(rng: np.random.Generator, scene: np.ndarray, camera: Camera, width: int, height: int) -> np.ndarray:
    """Return a random (height, width, 3) float32 view of the scene, its wall's foot where the camera has it."""
    left = int(rng.integers(scene.shape[1] - width + 1))
    wall_foot = camera.wall_foot + rng.uniform(-0.1, 0.1)
    top = int(np.clip(height * (1 - wall_foot), 0, scene.shape[0] - height))
    return scene[top : top + height, left : left + width].astype(np.float32)


def expose(rng: np.random.Generator, picture: np.ndarray, camera: Camera, sequence: int) -> Image.Image:
    """Return the picture as the camera records it.

    Args:
        rng: owned generator of this picture.
        picture: (H, W, 3) float32 in 0..255, the scene in neutral light.
        camera: whose light, colour cast, blur and noise to apply.
        sequence: 1, 2, ...: the hour of the day, which changes the light of one camera.

    Returns:
        RGB image of the same size.
    """
    height, width = picture.shape[:2]
    hour = (1.0, 0.9, 1.08)[(sequence - 1) % 3]
    cast = np.array(camera.cast, dtype=np.float32) * rng.normal(1, 0.02, 3).astype(np.float32)
    slope = rng.uniform(-0.15, 0.15)
    sunlight = np.linspace(1 - slope, 1 + slope, width, dtype=np.float32)[None, :, None]
    sunlight = sunlight * np.linspace(1.06, 0.94, height, dtype=np.float32)[:, None, None]
    if rng.random() < 0.2:
        sunlight = sunlight * _shadow_edge(rng, height, width)
    grey = picture.mean(axis=2, keepdims=True)
    light = grey + (picture - grey) * camera.saturation * rng.uniform(0.88, 1.1)
    light = np.clip(light / 255, 0, 1) ** np.float32(camera.gamma * rng.uniform(0.9, 1.1))
    light = light * sunlight * cast * np.float32(camera.gain * hour * rng.uniform(0.9, 1.1))
    haze = np.float32(camera.haze * rng.uniform(0.5, 1.5))
    light = light * (1 - haze) + haze * np.float32(0.8)
    image = Image.fromarray((np.clip(light, 0, 1) * 255).astype(np.uint8))

    detail = camera.detail * rng.uniform(0.8, 1.0)
    if detail < 0.95:
        image = image.resize((max(8, int(width * detail)), max(16, int(height * detail))), Image.Resampling.BILINEAR)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    blur = camera.blur * rng.uniform(0.4, 1.3) * height / 128
    image = image.filter(ImageFilter.GaussianBlur(blur))
    noise = rng.standard_normal((height, width, 3), dtype=np.float32) * np.float32(camera.noise * rng.uniform(0.5, 1.2))
    return Image.fromarray(np.clip(np.asarray(image, dtype=np.float32) + noise, 0, 255).astype(np.uint8))


def _shadow_edge(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return a (H, W, 1) float32 gain: the shadow of a roof or a tree over the upper or the lower part."""
    edge = rng.uniform(0.2, 0.8) + np.linspace(-0.15, 0.15, width, dtype=np.float32)[None, :] * rng.uniform(-1, 1)
    rows = np.linspace(0, 1, height, dtype=np.float32)[:, None]
    shaded = 1 / (1 + np.exp((rows - edge) * rng.choice((-40.0, 40.0))))
    return (1 - np.float32(0.35) * shaded.astype(np.float32))[:, :, None]


def _clouds(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return (H, W, 1) float32 smooth noise of about unit size, coarse and fine."""
    total = np.zeros((size[1], size[0]), dtype=np.float32)
    for cell in (48, 12):
        coarse = rng.standard_normal((size[1] // cell + 2, size[0] // cell + 2), dtype=np.float32)
        total += np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)) * 0.6
    return total[:, :, None]


# -- scenes: each paints onto an image whose wall meets the ground half-way down; unit is the height of a person ------


def _ground(draw: ImageDraw.ImageDraw, size: tuple[int, int], colour: tuple, line: tuple | None, unit: int) -> None:
    """Paint the ground, and its slabs in perspective if they have a line colour."""
    width, height = size
    foot = height // 2
    draw.rectangle((0, foot, width, height), fill=colour)
    if line is None:
        return
    row, step = foot, unit * 0.05
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
        x, y, r = rng.uniform(0, width), rng.uniform(height * 0.5, height), unit * rng.uniform(0.01, 0.05)
        draw.ellipse((x - 2 * r, y - r, x + 2 * r, y + r), fill=(128, 128, 130))


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
