"""Conversion of per-channel config values to the number of image channels."""

import pytest
from PIL import Image

from fastamp.config import get_cfg, per_channel
from fastamp.utils.errors import ConfigError


@pytest.mark.parametrize("values", [(7.5,), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 127.5)])
def test_per_channel_keeps_one_value_per_channel_unchanged(values):
    assert per_channel("MODEL.PIXEL_MEAN", values, channels=len(values)) == values


@pytest.mark.parametrize("color", [(124, 116, 104), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)])
def test_rgb_to_luma_conversion_matches_pillow(color):
    (gray,) = per_channel("INPUT.REA.VALUE", color, channels=1)
    assert gray == pytest.approx(Image.new("RGB", (1, 1), color).convert("L").getpixel((0, 0)), abs=0.51)


@pytest.mark.parametrize(
    ("count", "channels", "expected"), [(3, 4, "4"), (1, 3, "3"), (4, 3, "3"), (2, 1, "1 or 3"), (4, 1, "1 or 3")]
)
def test_per_channel_rejects_wrong_number_of_values(count, channels, expected):
    with pytest.raises(ConfigError) as raised:
        per_channel("MODEL.PIXEL_STD", (1.0,) * count, channels=channels)
    for text in ("MODEL.PIXEL_STD", f"INPUT.CHANNELS {channels}", f"{expected} values", f"got {count}", "fix: "):
        assert text in str(raised.value)


def test_default_rgb_colors_are_converted_to_luma_for_one_channel():
    cfg = get_cfg()
    for values in (cfg.MODEL.PIXEL_MEAN, cfg.INPUT.REA.VALUE):
        assert per_channel("X", values, channels=1) == pytest.approx((117.04,), abs=0.01)
