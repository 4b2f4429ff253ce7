"""Simulated surveillance cameras: viewpoint, exposure, blur and noise.

Powers, exponentials and angles are computed in float64: float32 results depend on the vector instructions of the CPU,
and the images with them.
"""

from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFilter


@dataclass(frozen=True)
class Camera:
    """Simulated camera. Angles are in radians, color values are gains, lengths are in pixels of the output image.

    Attributes:
        scene: name of the background.
        pitch: downward angle.
        yaws: typical walking directions.
        wall_foot: vertical position of the boundary between wall and ground, as a fraction of the box height.
        gain, gamma: exposure.
        cast: color cast, as the gain of each color channel.
        haze, saturation, blur, noise: mean strength; varied at random for each image.
        detail: resolution relative to the output; below 1 for distant or low-quality cameras.
        person_height: height of a person as a fraction of the box height.
        jpeg: range of JPEG qualities.
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
        gain=0.96,
        gamma=1.04,
        cast=(0.95, 0.99, 1.06),
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
        pitch=0.32,
        yaws=(3.1, 2.6, -0.6),
        wall_foot=0.08,
        gain=1.0,
        gamma=1.0,
        cast=(1.0, 0.99, 1.03),
        haze=0.05,
        saturation=0.94,
        blur=0.4,
        noise=4,
        detail=0.95,
        person_height=0.88,
        jpeg=(50, 80),
    ),
    Camera(
        scene="hall",
        pitch=0.22,
        yaws=(0.2, -0.2, 3.0),
        wall_foot=0.48,
        gain=0.98,
        gamma=0.98,
        cast=(1.04, 1.01, 0.94),
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
        gain=0.92,
        gamma=0.9,
        cast=(1.06, 0.99, 0.91),
        haze=0.03,
        saturation=0.94,
        blur=0.45,
        noise=5,
        detail=0.92,
        person_height=0.9,
        jpeg=(45, 78),
    ),
)


def make_camera(index: int, seed: int) -> Camera:
    """Return camera ``index`` (0, 1, ...): six predefined cameras, then the same six with different light."""
    camera = _CAMERAS[index % len(_CAMERAS)]
    if index < len(_CAMERAS):
        return camera
    rng = np.random.default_rng([seed, 1, index])
    cast = tuple(rng.uniform(0.75, 1.25, 3).tolist())
    return replace(camera, cast=cast, gain=rng.uniform(0.7, 1.15), pitch=camera.pitch * rng.uniform(0.7, 1.3))


def hour_gain(sequence: int) -> float:
    """Return the brightness at hour ``sequence`` (1, 2, ...) relative to the first hour."""
    return (1.0, 0.9, 1.08)[(sequence - 1) % 3]


def expose(rng: np.random.Generator, picture: np.ndarray, camera: Camera, sequence: int) -> Image.Image:
    """Render an image as recorded by the camera.

    Args:
        rng: generator of this image.
        picture: (H, W, 3) float32 in 0..255, the scene in neutral light.
        camera: light, color cast, blur and noise to apply.
        sequence: hour of the day, from 1; determines the brightness.

    Returns:
        RGB image of the same size.
    """
    height, width = picture.shape[:2]
    hour = hour_gain(sequence)
    cast = np.array(camera.cast, dtype=np.float32) * rng.normal(1, 0.02, 3).astype(np.float32)
    slope = rng.uniform(-0.15, 0.15)
    sunlight = np.linspace(1 - slope, 1 + slope, width, dtype=np.float32)[None, :, None]
    sunlight = sunlight * np.linspace(1.06, 0.94, height, dtype=np.float32)[:, None, None]
    if rng.random() < 0.15:
        sunlight = sunlight * _shadow_edge(rng, height, width)
    gray = picture.mean(axis=2, keepdims=True)
    light = gray + (picture - gray) * camera.saturation * rng.uniform(0.88, 1.1)
    light = np.float32(np.clip(light / 255, 0, 1) ** np.float64(camera.gamma * rng.uniform(0.9, 1.1)))
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


def expose_infrared(rng: np.random.Generator, picture: np.ndarray) -> Image.Image:
    """Render an image as recorded by a near-infrared camera with a lamp: gray, brightest in the middle, noisy.

    Args:
        rng: generator of this image.
        picture: (H, W, 3) float32 in 0..255, the scene with infrared reflectances.

    Returns:
        RGB image of the same size with three equal channels.
    """
    height, width = picture.shape[:2]
    rows = np.linspace(-1, 1, height)[:, None] - rng.uniform(-0.3, 0.3)
    columns = np.linspace(-1, 1, width)[None, :] - rng.uniform(-0.4, 0.4)
    lamp = np.exp(-0.35 * rows**2 - 0.6 * columns**2)
    gray = (picture.mean(axis=2) / 255) ** np.float64(rng.uniform(0.8, 1.25)) * lamp * np.float32(rng.uniform(1.1, 1.6))
    soft = Image.fromarray((np.clip(gray, 0, 1) * 255).astype(np.uint8))
    soft = soft.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 0.9) * height / 128))
    noise = rng.standard_normal((height, width), dtype=np.float32) * np.float32(rng.uniform(5, 11))
    noise += rng.standard_normal((height, 1), dtype=np.float32) * 2
    noisy = np.clip(np.asarray(soft, dtype=np.float32) + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert("RGB")


def _shadow_edge(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return a (H, W, 1) float32 gain that shades the upper or lower part of the image."""
    edge = rng.uniform(0.2, 0.8) + np.linspace(-0.15, 0.15, width)[None, :] * rng.uniform(-1, 1)
    rows = np.linspace(0, 1, height)[:, None]
    shaded = 1 / (1 + np.exp((rows - edge) * rng.choice((-40.0, 40.0))))
    return (1 - np.float32(0.28) * shaded.astype(np.float32))[:, :, None]
