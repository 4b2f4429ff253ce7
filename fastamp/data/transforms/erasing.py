"""What happens in a random rectangle: it is painted over, loses its color, or shows another image."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.config import Key, per_channel
from fastamp.data.transforms.base import TRANSFORM_REGISTRY, BatchTransform, Parameters, bitwise_where, byte_mask
from fastamp.data.transforms.color import to_grayscale

KEYS = (
    Key("INPUT.REA.ENABLED", False, "Random erasing: paint over a random rectangle of training images."),
    Key("INPUT.REA.PROB", 0.5, "Probability of erasing in an image.", low=0, high=1),
    Key(
        "INPUT.REA.VALUE",
        (123.675, 116.28, 103.53),
        "Color of the rectangle, in 0..255: INPUT.CHANNELS values, or three of RGB, which for grey images become "
        "their luma.",
        low=0,
        high=255,
    ),
    Key("INPUT.RPT.ENABLED", False, "Random patch: paste a part of another image of the batch over a training image."),
    Key("INPUT.RPT.PROB", 0.5, "Probability of pasting into an image.", low=0, high=1),
    Key("INPUT.LOCAL_GRAYSCALE.ENABLED", False, "Take the color out of a random rectangle of training images."),
    Key("INPUT.LOCAL_GRAYSCALE.PROB", 0.4, "Probability of a rectangle in an image.", low=0, high=1),
)

_ATTEMPTS = 10


class RandomRectangle(BatchTransform):
    """Draw a rectangle in an image, as torchvision's random erasing draws it.

    Its share of the area is uniform in ``scale``, its height / width log-uniform in ``ratio``, ten times at most until
    it fits, then its position uniform; an image in which none fitted has none.

    Args:
        prob: probability of a rectangle in an image.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest height / width.
    """

    draws = 1 + 2 * _ATTEMPTS + 2

    def __init__(self, *, prob: float, scale: tuple[float, float], ratio: tuple[float, float]) -> None:
        self.prob = prob
        self.scale = scale
        self.ratio = ratio

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return ``top``, ``left``, ``height`` and ``width``: (B,) int64; no height where there is no rectangle."""
        height, width = size
        erase, position = uniforms[:, 0] < self.prob, uniforms[:, 1:3]
        area = height * width * _interpolate(uniforms[:, 3 : 3 + _ATTEMPTS], self.scale)
        aspect = uniforms[:, 3 + _ATTEMPTS : 3 + 2 * _ATTEMPTS]
        ratio = np.exp(_interpolate(aspect, (math.log(self.ratio[0]), math.log(self.ratio[1]))))
        heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (heights < height) & (widths < width)
        first = (np.arange(len(uniforms)), fits.argmax(axis=1))
        erase = erase & fits.any(axis=1)
        heights, widths = np.where(erase, heights[first], 0), np.where(erase, widths[first], 0)
        tops, lefts = position[:, 0] * (height - heights + 1), position[:, 1] * (width - widths + 1)
        names = {"top": tops, "left": lefts, "height": heights, "width": widths}
        return {name: torch.from_numpy(value.astype(np.int64)) for name, value in names.items()}

    def inside(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return (B, 1, H, W) uint8 ``byte_mask`` of the pixels in each image's rectangle."""
        height, width = images.shape[-2:]
        rows = byte_mask(_interval_mask(parameters["top"], parameters["height"], height)).to(images.device)
        columns = byte_mask(_interval_mask(parameters["left"], parameters["width"], width)).to(images.device)
        return rows[:, None, :, None] & columns[:, None, None, :]


@TRANSFORM_REGISTRY.register("REA")
class RandomErasing(RandomRectangle):
    """Paint over one rectangle of an image (Zhong et al. 2017, arXiv:1708.04896).

    Args:
        prob, scale, ratio: see ``RandomRectangle``.
        value: one number for each channel, in 0..255, rounded to whole numbers.
    """

    def __init__(
        self,
        *,
        prob: float,
        value: tuple[float, ...],
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
    ) -> None:
        super().__init__(prob=prob, scale=scale, ratio=ratio)
        self.value = tuple(round(channel) for channel in value)

    @classmethod
    def from_config(cls, cfg: Any) -> "RandomErasing":
        """Return the erasing of INPUT.REA.

        Raises:
            ConfigError: see ``per_channel``.
        """
        value = per_channel("INPUT.REA.VALUE", cfg.INPUT.REA.VALUE, channels=cfg.INPUT.CHANNELS)
        return cls(prob=cfg.INPUT.REA.PROB, value=value)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the images with their rectangles in the color ``value``."""
        value = torch.tensor(self.value, dtype=torch.uint8, device=images.device).view(-1, 1, 1)
        erased = images.clone()
        # Image by image: a mask of the whole batch takes ten times as long on a CPU (measured: 2.6 and 0.3 ms for 64
        # images of 256x128).
        rectangles = torch.stack([parameters[name] for name in ("top", "left", "height", "width")], dim=1).tolist()
        for image, (top, left, height, width) in zip(erased, rectangles, strict=True):
            if height:
                image[:, top : top + height, left : left + width] = value
        return erased


@TRANSFORM_REGISTRY.register("LOCAL_GRAYSCALE")
class LocalGrayscale(RandomRectangle):
    """Take the color out of one rectangle of an image (Gong et al. 2021).

    Args:
        prob: probability of it.
    """

    def __init__(self, *, prob: float) -> None:
        super().__init__(prob=prob, scale=(0.02, 0.4), ratio=(0.3, 1 / 0.3))

    @classmethod
    def from_config(cls, cfg: Any) -> "LocalGrayscale":
        """Return the transform of INPUT.LOCAL_GRAYSCALE."""
        return cls(prob=cfg.INPUT.LOCAL_GRAYSCALE.PROB)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the images with their rectangles without color."""
        return bitwise_where(self.inside(images, parameters), to_grayscale(images), images)


@TRANSFORM_REGISTRY.register("RPT")
class RandomPatch(RandomRectangle):
    """Paste a part of another image of the batch, mirrored or not, over an image (Zhou et al. 2019, arXiv:1905.00953).

    The other image is one of those that the process augments together, so with this transform training depends on how
    many processes share a batch. FastReID keeps a pool of parts of earlier images instead, which no resume could
    restore.

    Args:
        prob: probability of it.
    """

    draws = RandomRectangle.draws + 4

    def __init__(self, *, prob: float) -> None:
        super().__init__(prob=prob, scale=(0.01, 0.5), ratio=(0.1, 10.0))

    @classmethod
    def from_config(cls, cfg: Any) -> "RandomPatch":
        """Return the transform of INPUT.RPT."""
        return cls(prob=cfg.INPUT.RPT.PROB)

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return the rectangle and, of the other image, ``other``: (B,) int64 position in the batch, ``from_top`` and
        ``from_left``: (B,) int64, and ``flip``: (B,) bool.
        """
        rectangle = super().parameters(uniforms, size)
        count, (source, row, column, flip) = len(uniforms), uniforms[:, -4:].T
        height, width = size
        own = {
            # Any but the image itself.
            "other": (np.arange(count) + 1 + np.floor(source * max(1, count - 1)).astype(np.int64)) % count,
            "from_top": (row * (height - rectangle["height"].numpy() + 1)).astype(np.int64),
            "from_left": (column * (width - rectangle["width"].numpy() + 1)).astype(np.int64),
            "flip": flip < 0.5,
        }
        return rectangle | {name: torch.from_numpy(value) for name, value in own.items()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the images with their rectangles filled from others."""
        height, width = images.shape[-2:]
        rows = torch.arange(height) - parameters["top"][:, None] + parameters["from_top"][:, None]
        columns = torch.arange(width) - parameters["left"][:, None]
        mirrored = parameters["width"][:, None] - 1 - columns
        columns = torch.where(parameters["flip"][:, None], mirrored, columns) + parameters["from_left"][:, None]
        rows, columns = rows.clamp(0, height - 1).to(images.device), columns.clamp(0, width - 1).to(images.device)
        other = parameters["other"].to(images.device)[:, None, None]
        parts = images.permute(0, 2, 3, 1)[other, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return bitwise_where(self.inside(images, parameters), parts, images)


def _interpolate(uniforms: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    return limits[0] + uniforms * (limits[1] - limits[0])


def _interval_mask(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return (B, size) bool, true from ``start`` on for ``length`` positions."""
    position = torch.arange(size)
    return (position >= start[:, None]) & (position < (start + length)[:, None])
