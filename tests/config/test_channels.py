"""One value a channel, or an error that says how many are needed."""

import pytest
from PIL import Image

from fastamp.config import get_cfg, per_channel
from fastamp.utils.errors import ConfigError


@pytest.mark.parametrize("values", [(7.5,), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 127.5)])
def test_as_many_values_as_channels_are_taken_as_they_are(values):
    assert per_channel("MODEL.PIXEL_MEAN", values, channels=len(values)) == values


@pytest.mark.parametrize("colour", [(124, 116, 104), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)])
def test_a_colour_becomes_the_grey_that_pil_makes_of_it(colour):
    (grey,) = per_channel("INPUT.REA.VALUE", colour, channels=1)
    assert grey == pytest.approx(Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0)), abs=0.51)


@pytest.mark.parametrize(
    ("count", "channels", "expected"), [(3, 4, "4"), (1, 3, "3"), (4, 3, "3"), (2, 1, "1 or 3"), (4, 1, "1 or 3")]
)
def test_any_other_number_is_refused(count, channels, expected):
    with pytest.raises(ConfigError) as raised:
        per_channel("MODEL.PIXEL_STD", (1.0,) * count, channels=channels)
    message = str(raised.value)
    assert f"MODEL.PIXEL_STD has {count} values, but INPUT.CHANNELS is {channels}; expected {expected} value" in message
    assert f"fix: write {expected} value" in message


def test_the_default_colours_serve_grey_images():
    cfg = get_cfg()
    for values in (cfg.MODEL.PIXEL_MEAN, cfg.INPUT.REA.VALUE):
        assert per_channel("X", values, channels=1) == pytest.approx((117.04,), abs=0.01)
