"""What simple pixel statistics reach without learning: the floors that a trained model must leave far behind.

Compare the features by cosine similarity.
"""

import torch
import torch.nn.functional as F

from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "colour_histogram": "fastamp.evaluation.baselines.color_histogram",
    },
)

_PIXEL_GRID = (32, 16)
_STRIPES = 6
# Standard deviation, in box widths, of the weight around the middle column.
_WEIGHT_WIDTH = 0.22
# Bins of hue, saturation and value.
_HUE_BINS, _SATURATION_BINS, _VALUE_BINS = 12, 3, 4


def raw_pixels(images: torch.Tensor) -> torch.Tensor:
    """Return the pixels themselves, shrunk, with the image's own mean colour and contrast taken out.

    Args:
        images: (B, C, H, W) uint8 or float in 0..255: grey, RGB, or RGB and a channel that is left out.

    Returns:
        (B, 1536) float32: 32 x 16 pixels of 3 channels, each channel with mean 0 and standard deviation 1 (a flat
        channel is 0); of grey images (B, 512).

    Raises:
        ValueError: ``images`` has other dimensions, or not 1, 3 or 4 channels.
    """
    pixels = _color_channels(images).float()
    small = F.interpolate(pixels, size=_PIXEL_GRID, mode="bilinear", align_corners=False, antialias=True)
    channels = small.flatten(2)
    centered = channels - channels.mean(dim=2, keepdim=True)
    deviation = centered.square().mean(dim=2, keepdim=True).sqrt()
    return (centered / deviation.clamp_min(1e-3)).flatten(1)


def color_histogram(images: torch.Tensor) -> torch.Tensor:
    """Return joint HSV histograms of horizontal stripes, under the Hellinger map.

    The classical appearance descriptor of the field (as in Gray and Tao 2008, "Viewpoint invariant pedestrian
    recognition with an ensemble of localized features"; differs: one joint HSV space, and pixels near the box's middle
    column weigh more, as in SDALF, Farenzena et al. 2010, since the box's edges show background).

    Args:
        images: (B, C, H, W) uint8 or float in 0..255: grey, RGB, or RGB and a channel that is left out; H at least 6.

    Returns:
        (B, 864) float32 of unit length, entries in 0..1: the inner product of two is the mean over 6 stripes of the
        Bhattacharyya coefficient of their 12 x 3 x 4 bin histograms.

    Raises:
        ValueError: ``images`` has other dimensions, not 1, 3 or 4 channels, or fewer rows than stripes.
    """
    pixels = _color_channels(images).expand(-1, 3, -1, -1)
    batch, _, height, width = pixels.shape
    if height < _STRIPES:
        raise ValueError(f"images have {height} rows; {_STRIPES} stripes need at least as many")
    hue, saturation, value = _rgb_to_hsv(pixels.float() / 255)
    bins = _index(hue, _HUE_BINS) * _SATURATION_BINS + _index(saturation, _SATURATION_BINS)
    bins = bins * _VALUE_BINS + _index(value, _VALUE_BINS)
    bin_count = _HUE_BINS * _SATURATION_BINS * _VALUE_BINS

    stripe = torch.arange(height, device=images.device) * _STRIPES // height
    slots = (stripe[None, :, None] * bin_count + bins).flatten(1)
    across = (torch.arange(width, device=images.device) + 0.5) / width - 0.5
    weights = torch.exp(-0.5 * (across / _WEIGHT_WIDTH).square()).expand(batch, height, width).flatten(1)
    histogram = torch.zeros(batch, _STRIPES * bin_count, device=images.device).scatter_add_(1, slots, weights)
    histogram = F.normalize(histogram.view(batch, _STRIPES, bin_count), p=1, dim=2) / _STRIPES
    return histogram.sqrt().flatten(1)


def _color_channels(images: torch.Tensor) -> torch.Tensor:
    """Return the (B, 1 or 3, H, W) grey or RGB channels; raise ValueError if ``images`` is no batch of images."""
    if images.ndim != 4 or images.shape[1] not in (1, 3, 4):
        raise ValueError(f"images must be (B, C, H, W) with 1, 3 or 4 channels; got shape {tuple(images.shape)}")
    return images[:, :3]


def _index(channel: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the int64 bin, 0..bins - 1, of every value in 0..1."""
    return (channel * bins).long().clamp_max(bins - 1)


def _rgb_to_hsv(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hue, saturation and value, each (B, H, W) in 0..1, of (B, 3, H, W) RGB in 0..1; a grey's hue is 0."""
    red, green, blue = images.unbind(1)
    value, strongest = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    divisor = chroma.clamp_min(1e-6)
    sectors = torch.stack(((green - blue) / divisor, (blue - red) / divisor + 2, (red - green) / divisor + 4))
    hue = sectors.gather(0, strongest[None])[0] / 6 % 1
    return hue, chroma / value.clamp_min(1e-6), value
