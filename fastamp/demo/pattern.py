"""Clothing patterns of the demo images, mapped onto a body."""

import numpy as np


def accent_mask(name: str, down: np.ndarray, azimuth: np.ndarray) -> np.ndarray:
    """Compute the mask of the garment pixels in the accent color.

    Args:
        name: one of ``wardrobe.PATTERNS``.
        down: (H, 1) float32, 0 at the collar and 1 at the hip; more for coats.
        azimuth: (1, W) float64 angle around the body in radians, -pi..pi, 0 in front.

    Returns:
        Bool, broadcastable to (H, W).
    """
    front_or_back = np.minimum(np.abs(azimuth), np.pi - np.abs(azimuth))
    if name == "stripes":
        return (down * 6.5) % 1 < 0.45
    if name == "wide_stripes":
        return (down * 3) % 1 < 0.5
    if name == "pinstripes":
        return (azimuth * 2.1) % 1 < 0.4
    if name == "checks":
        return ((down * 4.5) % 1 < 0.5) ^ ((azimuth * 1.43) % 1 < 0.5)
    if name == "two_tone":
        return down > 0.5
    if name == "chest_band":
        return (down > 0.28) & (down < 0.52)
    if name == "logo":
        return ((front_or_back / 0.62) ** 2 + ((down - 0.38) / 0.2) ** 2) < 1
    if name == "dots":
        row = np.floor(down * 5)
        return (((down * 5) % 1 - 0.5) ** 2 + (((azimuth * 1.43 + row * 0.5) % 1) - 0.5) ** 2) < 0.09
    if name == "sash":
        return np.abs(down - 0.5 - 0.42 * np.sin(azimuth)) < 0.15
    if name == "open_jacket":
        return (np.abs(azimuth) < 0.5) | ((np.abs(azimuth) > np.pi / 2) & (down < 0.34))
    if name == "side_panels":
        return front_or_back > 0.85
    return np.zeros((1, 1), dtype=bool)
