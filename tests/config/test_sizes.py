"""Image sizes: accepted forms of the config values, and the input size of the model."""

import itertools

import pytest

from fastamp.config import fixed_input_size, get_cfg, input_size, size_key
from fastamp.utils.errors import ConfigError


def config(*opts):
    cfg = get_cfg()
    cfg.merge_from_list(list(opts))
    return cfg


def test_invalid_image_size_error_lists_the_accepted_forms(subtests):
    texts = ["(64, 32, 3)", "()", "(0, 32)", "(0, 0)", "-1", "(9000,)", "(64, 9000)"]
    for key, text in itertools.product(["INPUT.SIZE_TRAIN", "INPUT.SIZE_TEST", "INPUT.CROP.SIZE"], texts):
        with subtests.test(key=key, text=text):
            forms = "(height, width) or (side,)" if "CROP" in key else "(height, width), (shorter_side,) or (0,)"
            with pytest.raises(ConfigError) as raised:
                config(key, text)
            assert key in str(raised.value) and forms in str(raised.value)


@pytest.mark.parametrize("text, size", [("(0,)", (0,)), ("[256,]", (256,)), ("256", (256,)), ("(64, 32)", (64, 32))])
def test_accepted_forms_of_image_sizes_are_converted_to_tuples(text, size):
    cfg = config("INPUT.SIZE_TRAIN", text, "INPUT.SIZE_TEST", text)
    assert cfg.INPUT.SIZE_TRAIN == cfg.INPUT.SIZE_TEST == size


def test_crop_size_zero_raises():
    with pytest.raises(ConfigError, match=r"INPUT\.CROP\.SIZE .*\(0,\)"):
        config("INPUT.CROP.SIZE", "(0,)")


@pytest.mark.parametrize(
    "opts, train, test",
    [
        ((), (256, 128), (256, 128)),
        (("INPUT.CROP", "True"), (224, 224), (224, 224)),
        (("INPUT.CROP", "True", "INPUT.CROP.SIZE", "(96,)"), (96, 96), (96, 96)),
        (("INPUT.SIZE_TRAIN", "(64,)", "INPUT.SIZE_TEST", "(0,)"), None, None),
        (("INPUT.SIZE_TRAIN", "(64,)", "INPUT.SIZE_TEST", "(64,)", "INPUT.PADDING", "True"), (64, 64), None),
        (("INPUT.SIZE_TRAIN", "(0,)", "INPUT.PADDING", "True"), None, (256, 128)),
        (("INPUT.SIZE_TRAIN", "(0,)", "INPUT.SIZE_TEST", "(64,)", "INPUT.CROP", "True"), (224, 224), (224, 224)),
    ],
)
def test_input_size_depends_on_crop_size_and_padding_keys(opts, train, test):
    cfg = config(*opts)
    assert (input_size(cfg, is_train=True), input_size(cfg, is_train=False)) == (train, test)
    assert size_key(cfg, is_train=False) == ("INPUT.CROP.SIZE" if "INPUT.CROP" in opts else "INPUT.SIZE_TEST")


def test_fixed_input_size_rejects_sizes_that_depend_on_the_image():
    cfg = config("INPUT.SIZE_TEST", "(64,)")
    assert fixed_input_size(cfg, is_train=True, needed_by="X") == (256, 128)
    with pytest.raises(ConfigError, match=r"X .*INPUT\.SIZE_TEST \(64,\)") as raised:
        fixed_input_size(cfg, is_train=False, needed_by="X")
    assert "fix: set INPUT.SIZE_TEST to " in str(raised.value)
