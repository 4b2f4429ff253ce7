"""Where pixels go: resizing, mirroring, and padding with a random crop."""

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from fastamp.data.transforms.base import BatchTransform, Parameters

_ATTEMPTS = 10
PADDING_MODES = ("constant", "edge", "reflect", "symmetric")


class Resize:
    """Antialiased bicubic resizing of one image, equal to PIL's within rounding.

    Args:
        size: height and width in pixels.
    """

    def __init__(self, *, size: tuple[int, int]) -> None:
        self.size = size

    def __call__(self, image: Tensor) -> Tensor:
        """Return a (C, H, W) uint8 ``image`` at ``size``."""
        if tuple(image.shape[-2:]) == self.size:
            return image
        return functional.resize(image, list(self.size), interpolation=InterpolationMode.BICUBIC, antialias=True)


class RandomHorizontalFlip(BatchTransform):
    """Mirror an image left to right with probability ``prob``."""

    draws = 1

    def __init__(self, *, prob: float) -> None:
        self.prob = prob

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return ``flip``: (B,) bool."""
        return {"flip": torch.from_numpy(uniforms[:, 0] < self.prob)}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the images, those with ``flip`` mirrored."""
        mirrored = images.flip(-1)
        # Image by image: indexing and torch.where take ten times as long on bytes (measured on a CPU).
        for index in (~parameters["flip"]).nonzero()[:, 0].tolist():
            mirrored[index] = images[index]
        return mirrored


class PadAndRandomCrop(BatchTransform):
    """Pad each side, then cut the original size out at a random place.

    Args:
        padding: pixels on each side.
        mode: ``constant`` (black), ``edge``, ``reflect`` or ``symmetric``, as torchvision's ``Pad``.
    """

    draws = 2

    def __init__(self, *, padding: int, mode: str) -> None:
        self.padding = padding
        self.mode = mode

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return ``top`` and ``left``: (B,) int64 in 0..2 * padding, in the padded image."""
        corners = torch.from_numpy((uniforms * (2 * self.padding + 1)).astype(np.int64))
        return {"top": corners[:, 0], "left": corners[:, 1]}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return the crops, as large as ``images``.

        A crop is copied row by row: a (rows, W) view of the padded batch holds W pixels from every offset on, so
        that one index a row is enough (measured: 10 to 80 times the speed of an index a pixel).
        """
        batch, channels, height, width = images.shape
        padded = self._pad(images)
        padded_height, padded_width = padded.shape[-2:]
        device = images.device
        planes = torch.arange(batch * channels, device=device).view(batch, channels, 1)
        top, left = (parameters[name].to(device).view(batch, 1, 1) for name in ("top", "left"))
        rows = top + torch.arange(height, device=device)
        offsets = (planes * padded_height + rows) * padded_width + left
        return padded.flatten().unfold(0, width, 1).index_select(0, offsets.flatten()).view(images.shape)

    def _pad(self, images: Tensor) -> Tensor:
        """Return (B, C, H + 2 padding, W + 2 padding) uint8."""
        batch, channels, height, width = images.shape
        padding = self.padding
        inner_rows, inner_columns = slice(padding, padding + height), slice(padding, padding + width)
        padded = images.new_zeros(batch, channels, height + 2 * padding, width + 2 * padding)
        padded[:, :, inner_rows, inner_columns] = images
        if self.mode == "constant":
            return padded
        before, after = (side.to(images.device) + padding for side in self._sources(width))
        padded[:, :, inner_rows, :padding] = padded[:, :, inner_rows, before]
        padded[:, :, inner_rows, padding + width :] = padded[:, :, inner_rows, after]
        before, after = (side.to(images.device) + padding for side in self._sources(height))
        padded[:, :, :padding] = padded[:, :, before]
        padded[:, :, padding + height :] = padded[:, :, after]
        return padded

    def _sources(self, length: int) -> tuple[Tensor, Tensor]:
        """Return which of ``length`` pixels each pixel of the padding before and after them repeats."""
        distance = torch.arange(1, self.padding + 1)
        if self.mode == "edge":
            distance = torch.zeros_like(distance)
        elif self.mode == "symmetric":
            distance = distance - 1
        return distance.flip(0), length - 1 - distance


class RandomResizedCrop(BatchTransform):
    """Cut out a random part of an image and resize it, bicubic with antialiasing.

    The part is drawn as torchvision draws it: its share of the area uniformly from ``scale``, its width / height
    log-uniformly from ``ratio``, ten times at most until it fits, then its place; where none fits, the largest part
    in the middle whose width / height is allowed.

    Args:
        size: height and width afterwards.
        scale: smallest and largest share of the image's area.
        ratio: smallest and largest width / height.
    """

    draws = 2 + 2 * _ATTEMPTS

    def __init__(self, *, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> None:
        self.size = size
        self.scale = scale
        self.ratio = ratio

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return ``size`` of the constructor."""
        return self.size

    def parameters(self, uniforms: np.ndarray, size: tuple[int, int]) -> Parameters:
        """Return ``top``, ``left``, ``height`` and ``width`` of each part: (B,) int64."""
        height, width = size
        place, area, aspect = uniforms[:, :2], uniforms[:, 2 : 2 + _ATTEMPTS], uniforms[:, 2 + _ATTEMPTS :]
        area = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
        low, high = np.log(self.ratio)
        aspect = np.exp(low + aspect * (high - low))
        widths, heights = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first, any_fits = (np.arange(len(uniforms)), fits.argmax(axis=1)), fits.any(axis=1)
        spare_height, spare_width = self._middle(size)
        heights = np.where(any_fits, heights[first], spare_height)
        widths = np.where(any_fits, widths[first], spare_width)
        tops = np.where(any_fits, np.floor(place[:, 0] * (height - heights + 1)), (height - heights) // 2)
        lefts = np.where(any_fits, np.floor(place[:, 1] * (width - widths + 1)), (width - widths) // 2)
        names = {"top": tops, "left": lefts, "height": heights, "width": widths}
        return {name: torch.from_numpy(value.astype(np.int64)) for name, value in names.items()}

    def apply(self, images: Tensor, parameters: Parameters) -> Tensor:
        """Return (B, C, *size) uint8."""
        places = {name: value.to(images.device) for name, value in parameters.items()}
        across = resampling(places["left"], places["width"], images.shape[-1], self.size[1])
        down = resampling(places["top"], places["height"], images.shape[-2], self.size[0])
        # As torchvision on bytes: rounded after each of the two passes.
        narrowed = _rounded(images.float() @ across.transpose(1, 2)[:, None])
        return _rounded(down[:, None] @ narrowed).to(torch.uint8)

    def _middle(self, size: tuple[int, int]) -> tuple[int, int]:
        height, width = size
        if width / height < self.ratio[0]:
            return max(1, round(width / self.ratio[0])), width
        return (height, max(1, round(height * self.ratio[1]))) if width / height > self.ratio[1] else (height, width)


def resampling(start: Tensor, length: Tensor, size: int, output: int) -> Tensor:
    """Return (B, output, size) float32 weights that resize a part of each row by antialiased bicubic interpolation.

    Args:
        start, length: (B,) int64, the part of each image.
        size: pixels of a row.
        output: pixels afterwards.
    """
    scale = (length / output)[:, None, None]
    stretch = scale.clamp(min=1)
    pixel = torch.arange(size, device=start.device) + 0.5
    centre = start[:, None, None] + scale * (torch.arange(output, device=start.device)[:, None] + 0.5)
    distance = ((pixel - centre) / stretch).abs()
    # Keys 1981 with a = -1/2.
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    inside = (pixel > start[:, None, None]) & (pixel < (start + length)[:, None, None])
    weights = weights * inside
    return weights / weights.sum(dim=2, keepdim=True)


def _rounded(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255)
