"""One value for each channel of the images, from keys that hold a colour."""

from collections.abc import Sequence

from fastamp.utils.errors import ConfigError

# Shares of red, green and blue in the luma (ITU-R BT.601).
_LUMA = (0.299, 0.587, 0.114)


def per_channel(key: str, values: Sequence[float], *, channels: int) -> tuple[float, ...]:
    """Return ``channels`` values: those given, or for grey images the luma of three (ITU-R BT.601).

    So INPUT.CHANNELS 1 needs no other change of a recipe for RGB. The luma of three standard deviations is that of
    channels which go up and down together, as those of photographs nearly do.

    Args:
        key: the key that holds ``values``, for the message.
        values: one a channel, or an RGB colour where ``channels`` is 1.
        channels: ``INPUT.CHANNELS``.

    Raises:
        ConfigError: any other number of values.
    """
    if len(values) == channels:
        return tuple(values)
    if len(values) == len(_LUMA) and channels == 1:
        return (sum(share * value for share, value in zip(_LUMA, values, strict=True)),)
    expected = f"1 or {len(_LUMA)}" if channels == 1 else str(channels)
    raise ConfigError(
        f"{key} has {len(values)} values, but INPUT.CHANNELS is {channels}; expected {expected} values.\n"
        f"  fix: write {expected} values into {key}, or change INPUT.CHANNELS"
    )
