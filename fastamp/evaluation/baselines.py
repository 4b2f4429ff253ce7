"""Baselines without learning: features from raw pixels and color histograms, compared by cosine similarity."""

import torch
import torch.nn.functional as F

_PIXEL_GRID = (32, 16)
_STRIPES = 6
# Standard deviation of the horizontal Gaussian weight, as a fraction of the box width.
_WEIGHT_WIDTH = 0.22
_HUE_BINS, _SATURATION_BINS, _VALUE_BINS = 12, 3, 4


def raw_pixels(images: torch.Tensor) -> torch.Tensor:
    """Compute the standardized pixels of downscaled images.

    Args:
        images: (B, C, H, W) uint8 or float in 0..255: gray, RGB, or RGB with a fourth channel, which is ignored.

    Returns:
        (B, 1536) float32, or (B, 512) for gray images: 32 x 16 pixels per channel. Each channel of each image is scaled
        to mean 0 and standard deviation 1; a constant channel becomes 0.

    Raises:
        ValueError: if ``images`` is not 4-dimensional with 1, 3 or 4 channels.
    """
    pixels = _color_channels(images).float()
    small = F.interpolate(pixels, size=_PIXEL_GRID, mode="bilinear", align_corners=False, antialias=True)
    channels = small.flatten(2)
    centered = channels - channels.mean(dim=2, keepdim=True)
    deviation = centered.square().mean(dim=2, keepdim=True).sqrt()
    return (centered / deviation.clamp_min(1e-3)).flatten(1)


def color_histogram(images: torch.Tensor) -> torch.Tensor:
    """Compute the square roots of joint HSV histograms of horizontal stripes (Hellinger map).

    Color histograms of stripes are a classical feature for re-identification: Gray and Tao 2008, "Viewpoint invariant
    pedestrian recognition with an ensemble of localized features". This implementation computes one joint HSV histogram
    per stripe. As in SDALF (Farenzena et al. 2010), pixels near the vertical center line of the image have larger
    weights, because the left and right edges show background.

    Args:
        images: (B, C, H, W) uint8 or float in 0..255: gray, RGB, or RGB with a fourth channel, which is ignored; H must
            be at least 6.

    Returns:
        (B, 864) float32 unit vectors with entries in 0..1. The inner product of two features is the mean over 6
        stripes of the Bhattacharyya coefficient of their 12 x 3 x 4 bin histograms.

    Raises:
        ValueError: if ``images`` is not 4-dimensional with 1, 3 or 4 channels, or H is below 6.
    """
    pixels = _color_channels(images).expand(-1, 3, -1, -1)
    batch, _, height, width = pixels.shape
    if height < _STRIPES:
        raise ValueError(f"images must have at least {_STRIPES} rows of pixels, one for each stripe; got {height}")
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
    """Return the (B, 1 or 3, H, W) gray or RGB channels; raise ValueError if the shape is wrong."""
    if images.ndim != 4 or images.shape[1] not in (1, 3, 4):
        raise ValueError(f"images must have shape (B, C, H, W) with 1, 3 or 4 channels; got {tuple(images.shape)}")
    return images[:, :3]


def _index(channel: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the int64 bin indices, in 0..bins - 1, of values in 0..1."""
    return (channel * bins).long().clamp_max(bins - 1)


def _rgb_to_hsv(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert (B, 3, H, W) RGB in 0..1 to hue, saturation and value, each (B, H, W) in 0..1; gray has hue 0."""
    red, green, blue = images.unbind(1)
    value, strongest = images.max(dim=1)
    chroma = value - images.amin(dim=1)
    divisor = chroma.clamp_min(1e-6)
    sectors = torch.stack(((green - blue) / divisor, (blue - red) / divisor + 2, (red - green) / divisor + 4))
    hue = sectors.gather(0, strongest[None])[0] / 6 % 1
    return hue, chroma / value.clamp_min(1e-6), value
