"""Random erasing: paint over a random rectangle."""

import math

import numpy as np
import torch
from torch import Tensor

from fastamp.data.transforms.base import BatchTransform, Parameters, bits, choose

_ATTEMPTS = 10


class RandomErasing(BatchTransform):
    """Paint over one rectangle of an image (Zhong et al. 2017, arXiv:1708.04896).

    The rectangle is drawn as torchvision draws it: its share of the area uniformly from ``scale``, its height / width
    log-uniformly from ``ratio``, ten times at most until it fits, then its place uniformly; an image in which none
    fitted stays whole.

    Args:
        prob: probability of erasing in an image.
        value: one number for each channel, in 0..255, rounded to whole numbers.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest height / width.
    """

    draws = 1 + 2 * _ATTEMPTS + 2

    def __init__(
        self,
        *,
        prob: float,
        value: tuple[float, ...],
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
    ) -> None:
        self.prob = prob
        self.value = tuple(round(channel) for channel in value)
        self.scale = scale
        self.ratio = ratio

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return ``top``, ``left``, ``height`` and ``width``: (B,) int64; no height where nothing is erased."""
        height, width = size
        erase, place = uniforms[:, 0] < self.prob, uniforms[:, 1:3]
        area = height * width * _between(uniforms[:, 3 : 3 + _ATTEMPTS], self.scale)
        ratio = np.exp(_between(uniforms[:, 3 + _ATTEMPTS :], (math.log(self.ratio[0]), math.log(self.ratio[1]))))
        heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (heights < height) & (widths < width)
        first = (np.arange(len(uniforms)), fits.argmax(axis=1))
        erase = erase & fits.any(axis=1)
        heights, widths = np.where(erase, heights[first], 0), np.where(erase, widths[first], 0)
        tops, lefts = place[:, 0] * (height - heights + 1), place[:, 1] * (width - widths + 1)
        names = {"top": tops, "left": lefts, "height": heights, "width": widths}
        return {name: torch.from_numpy(value.astype(np.int64)) for name, value in names.items()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the images with their rectangles in the colour ``value``."""
        height, width = images.shape[-2:]
        rows = bits(_span(parameters["top"], parameters["height"], height)).to(images.device)
        columns = bits(_span(parameters["left"], parameters["width"], width)).to(images.device)
        inside = rows[:, None, :, None] & columns[:, None, None, :]
        value = torch.tensor(self.value, dtype=torch.uint8, device=images.device).view(-1, 1, 1)
        return choose(inside, value, images)


def _between(uniforms: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    return limits[0] + uniforms * (limits[1] - limits[0])


def _span(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return (B, size) bool, true from ``start`` on for ``length`` places."""
    place = torch.arange(size)
    return (place >= start[:, None]) & (place < (start + length)[:, None])
