"""Transforms of a random rectangle: erasing, conversion to grayscale, and patches from other images."""

import math

import numpy as np
import torch
from torch import Tensor

from fastamp.config import CfgNode, Key, per_channel
from fastamp.data.transforms.base import (
    TRANSFORM_REGISTRY,
    BatchTransform,
    Parameters,
    bitwise_where,
    byte_mask,
    on_device,
)
from fastamp.data.transforms.color import to_grayscale

KEYS = (
    Key("INPUT.REA.ENABLED", False, "Random erasing: fill a random rectangle of training images with a color."),
    Key("INPUT.REA.PROB", 0.5, "Probability of erasing a rectangle in an image.", low=0, high=1),
    Key(
        "INPUT.REA.VALUE",
        (123.675, 116.28, 103.53),
        "Color of the rectangle, in 0..255: INPUT.CHANNELS values, or three RGB values, converted to luma for "
        "grayscale images.",
        low=0,
        high=255,
    ),
    Key(
        "INPUT.RPT.ENABLED", False, "Random patch: paste a patch from another image of the batch into a training image."
    ),
    Key("INPUT.RPT.PROB", 0.5, "Probability of pasting a patch into an image.", low=0, high=1),
    Key("INPUT.LOCAL_GRAYSCALE.ENABLED", False, "Convert a random rectangle of training images to grayscale."),
    Key("INPUT.LOCAL_GRAYSCALE.PROB", 0.4, "Probability of converting a rectangle in an image.", low=0, high=1),
)

_ATTEMPTS = 10


class RandomRectangle(BatchTransform):
    """Base class of transforms that modify a random rectangle, sampled as in torchvision's ``RandomErasing``.

    The area, as a fraction of the image area, is uniform in ``scale``. The aspect ratio (height / width) is log-uniform
    in ``ratio``. Area and aspect ratio are drawn up to ten times until the rectangle fits into the image. If none fits,
    the image is not changed. The position of the rectangle is uniform.

    Args:
        prob: probability of modifying an image.
        scale: minimum and maximum area of the rectangle, as a fraction of the image area.
        ratio: minimum and maximum aspect ratio (height / width) of the rectangle.
    """

    draws = 1 + 2 * _ATTEMPTS + 2

    def __init__(self, *, prob: float, scale: tuple[float, float], ratio: tuple[float, float]) -> None:
        self.prob = prob
        self.scale = scale
        self.ratio = ratio

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute ``top``, ``left``, ``height`` and ``width`` of each rectangle in pixels: (B,) int64.

        The height is 0 for images that are not modified.
        """
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
        """Return the (B, 1, H, W) uint8 mask of the rectangles: 255 inside, 0 outside."""
        height, width = images.shape[-2:]
        copies = on_device(parameters, images.device)
        rows = byte_mask(_interval_mask(copies["top"], copies["height"], height))
        columns = byte_mask(_interval_mask(copies["left"], copies["width"], width))
        return rows[:, None, :, None] & columns[:, None, None, :]


@TRANSFORM_REGISTRY.register("REA")
class RandomErasing(RandomRectangle):
    """Fill a random rectangle with a color (Zhong et al. 2017, arXiv:1708.04896).

    Args:
        prob, scale, ratio: see ``RandomRectangle``.
        value: color of the rectangle: one number in 0..255 per channel, rounded to an integer.
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
    def from_config(cls, cfg: CfgNode) -> "RandomErasing":
        """Build the transform from the config section ``INPUT.REA``.

        Raises:
            ConfigError: if the number of values in INPUT.REA.VALUE does not match INPUT.CHANNELS.
        """
        value = per_channel("INPUT.REA.VALUE", cfg.INPUT.REA.VALUE, channels=cfg.INPUT.CHANNELS)
        return cls(prob=cfg.INPUT.REA.PROB, value=value)

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Fill the rectangles with ``value``."""
        value = images.new_empty(len(self.value), 1, 1)
        for channel, number in zip(value, self.value, strict=True):
            channel.fill_(number)  # torch.tensor would copy from the host
        erased = images.clone()
        # Image by image: a mask for the batch takes nearly ten times as long (measured on a CPU: 2.6 ms instead of
        # 0.3 ms for 64 images of 256x128).
        rectangles = torch.stack([parameters[name] for name in ("top", "left", "height", "width")], dim=1).tolist()
        for image, (top, left, height, width) in zip(erased, rectangles, strict=True):
            if height:
                image[:, top : top + height, left : left + width] = value
        return erased


@TRANSFORM_REGISTRY.register("LOCAL_GRAYSCALE")
class LocalGrayscale(RandomRectangle):
    """Convert a random rectangle to grayscale (Gong et al. 2021).

    Args:
        prob: probability of converting a rectangle in an image.
    """

    section = "LOCAL_GRAYSCALE"

    def __init__(self, *, prob: float) -> None:
        super().__init__(prob=prob, scale=(0.02, 0.4), ratio=(0.3, 1 / 0.3))

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Convert the rectangles to grayscale."""
        return bitwise_where(self.inside(images, parameters), to_grayscale(images), images)


@TRANSFORM_REGISTRY.register("RPT")
class RandomPatch(RandomRectangle):
    """Paste a patch from another image of the batch, randomly flipped (Zhou et al. 2019, arXiv:1905.00953).

    The patch comes from an image that is augmented in the same process and in the same batch. Results therefore depend
    on the number of processes. FastReID instead stores patches from earlier images, which a resumed run could not
    restore.

    Args:
        prob: probability of pasting a patch into an image.
    """

    section = "RPT"
    draws = RandomRectangle.draws + 4

    def __init__(self, *, prob: float) -> None:
        super().__init__(prob=prob, scale=(0.01, 0.5), ratio=(0.1, 10.0))

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Compute the rectangle and the source patch of each image.

        Returns:
            Parameters of ``RandomRectangle``, and ``other``: (B,) int64 index of the source image in the batch;
                    ``from_top`` and ``from_left``: (B,) int64 top left corner of the patch in the source image;
                ``flip``: (B,) bool mask of patches to flip.
        """
        rectangle = super().parameters(uniforms, size)
        count, (source, row, column, flip) = len(uniforms), uniforms[:, -4:].T
        height, width = size
        patch = {
            # Any image except the image itself.
            "other": (np.arange(count) + 1 + np.floor(source * max(1, count - 1)).astype(np.int64)) % count,
            "from_top": (row * (height - rectangle["height"].numpy() + 1)).astype(np.int64),
            "from_left": (column * (width - rectangle["width"].numpy() + 1)).astype(np.int64),
            "flip": flip < 0.5,
        }
        return rectangle | {name: torch.from_numpy(value) for name, value in patch.items()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Fill the rectangles with patches from other images."""
        height, width = images.shape[-2:]
        copies = {name: value[:, None] for name, value in on_device(parameters, images.device).items()}
        rows = torch.arange(height, device=images.device) - copies["top"] + copies["from_top"]
        columns = torch.arange(width, device=images.device) - copies["left"]
        mirrored = copies["width"] - 1 - columns
        columns = torch.where(copies["flip"], mirrored, columns) + copies["from_left"]
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        other = copies["other"][:, None]
        parts = images.permute(0, 2, 3, 1)[other, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        return bitwise_where(self.inside(images, parameters), parts, images)


def _interpolate(uniforms: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    return limits[0] + uniforms * (limits[1] - limits[0])


def _interval_mask(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return a (B, size) bool mask that is True at positions in [start, start + length)."""
    position = torch.arange(size, device=start.device)
    return (position >= start[:, None]) & (position < (start + length)[:, None])
