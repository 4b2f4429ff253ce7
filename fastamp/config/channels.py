"""Conversion of config values with one element per RGB channel to the number of image channels."""

from collections.abc import Sequence

from fastamp.utils.errors import ConfigError

# Weights of red, green and blue in the luma (ITU-R BT.601).
_LUMA = (0.299, 0.587, 0.114)


def per_channel(key: str, values: Sequence[float], *, channels: int) -> tuple[float, ...]:
    """Return one value per channel; for grayscale images, RGB values are converted to luma (ITU-R BT.601).

    Therefore, an RGB recipe works on grayscale images if INPUT.CHANNELS is set to 1. For standard deviations, the
    conversion is exact only if the three channels are fully correlated, as they nearly are in photographs.

    Args:
        key: config key of ``values``, for the message.
        values: one value per channel, or three RGB values if ``channels`` is 1.
        channels: ``INPUT.CHANNELS``.

    Raises:
        ConfigError: if the number of values does not match ``channels``.
    """
    if len(values) == channels:
        return tuple(values)
    if len(values) == len(_LUMA) and channels == 1:
        return (sum(weight * value for weight, value in zip(_LUMA, values, strict=True)),)
    expected = f"1 or {len(_LUMA)}" if channels == 1 else str(channels)
    raise ConfigError(
        f"{key}: expected {expected} values for INPUT.CHANNELS {channels}, got {len(values)}.\n"
        f"  fix: set {key} to {expected} values, or change INPUT.CHANNELS"
    )
