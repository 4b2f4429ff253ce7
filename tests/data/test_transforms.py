import math

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as tvf
from PIL import Image
from torchvision.transforms import v2

from fastamp.config import get_cfg
from fastamp.data.transforms import (
    Augmentation,
    AutoAugment,
    ColorJitter,
    PadAndRandomCrop,
    RandomAffine,
    RandomErasing,
    RandomHorizontalFlip,
    Resize,
    build_transforms,
)
from fastamp.utils.errors import ConfigError

SIZE = (40, 24)
JITTER = {"brightness": 0.5, "contrast": 0.5, "saturation": 0.8, "hue": 0.5}


@pytest.fixture
def images():
    return make_images()


def make_images(channels=3):
    """Noise, smooth colours, black, white and grey, in their first channels or with a channel of noise behind them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 3, *SIZE), dtype=torch.uint8, generator=generator)
    ramp = torch.linspace(0, 255, SIZE[1]).expand(3, *SIZE) * torch.tensor([1.0, 0.5, 0.2]).view(3, 1, 1)
    flat = torch.tensor([0, 255, 128], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, *SIZE)
    colours = torch.cat((noise, ramp.to(torch.uint8)[None], flat))
    fourth = torch.randint(0, 256, (len(colours), 1, *SIZE), dtype=torch.uint8, generator=generator)
    return torch.cat((colours, fourth), dim=1)[:, :channels]


def draw(transform, count, size=SIZE, seed=0):
    (parameters,) = Augmentation(transforms=[transform], seed=seed).draw([0] * count, range(count), size)
    return parameters


@pytest.mark.parametrize("source", [(128, 64), (256, 128), (97, 41), (300, 180), (20, 333)])
def test_resize_equals_pil(source):
    pixels = np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(pixels).resize((source[1] // 4, source[0] // 4)).resize(source[::-1]))
    for array in (pixels, smooth):
        ours = Resize(size=(256, 128))(torch.from_numpy(array.copy()).permute(2, 0, 1))
        pil = np.asarray(Image.fromarray(array).resize((128, 256), Image.Resampling.BICUBIC))
        assert ours.shape == (3, 256, 128) and ours.dtype == torch.uint8
        difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - pil)
        # Both round between the two directions, where a difference of one may become two.
        assert difference.max() <= 2 and (difference > 1).mean() < 1e-3 and difference.mean() < 0.05


def test_flip_mirrors_the_chosen_images(images):
    flip = torch.arange(len(images)) % 2 == 0
    flipped = RandomHorizontalFlip(prob=0.5).apply(images, {"flip": flip})
    for before, after, mirrored in zip(images, flipped, flip, strict=True):
        assert torch.equal(after, tvf.hflip(before) if mirrored else before)


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_flip_probability(prob):
    assert draw(RandomHorizontalFlip(prob=prob), 5000)["flip"].float().mean().item() == pytest.approx(prob, abs=0.02)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
@pytest.mark.parametrize("padding", [0, 1, 10, 23])
def test_crop_equals_torchvision(images, mode, padding):
    crop = PadAndRandomCrop(padding=padding, mode=mode)
    parameters = draw(crop, len(images))
    cropped = crop.apply(images, parameters)
    for index, (before, after) in enumerate(zip(images, cropped, strict=True)):
        pil = tvf.pad(tvf.to_pil_image(before), padding, padding_mode=mode)
        top, left = parameters["top"][index].item(), parameters["left"][index].item()
        assert torch.equal(after, tvf.crop(tvf.pil_to_tensor(pil), top, left, *SIZE))


def test_crop_takes_every_place_equally_often():
    parameters = draw(PadAndRandomCrop(padding=2, mode="constant"), 10_000)
    for name in ("top", "left"):
        assert parameters[name].bincount(minlength=5).tolist() == pytest.approx([2000] * 5, abs=200)
    assert len(parameters["top"].bincount()) == 5


def test_erasing_paints_the_rectangle_in_the_rounded_colour(images):
    erasing = RandomErasing(prob=1.0, value=(123.675, 116.28, 103.53))
    parameters = draw(erasing, len(images))
    erased = erasing.apply(images, parameters)
    colour = torch.tensor([124, 116, 104], dtype=torch.uint8).view(3, 1, 1)
    for index, (before, after) in enumerate(zip(images, erased, strict=True)):
        rectangle = [parameters[name][index].item() for name in ("top", "left", "height", "width")]
        assert rectangle[2] > 0 and rectangle[3] > 0
        assert torch.equal(after, tvf.erase(before, *rectangle, colour))


@pytest.mark.parametrize("colours", [(117.04,), (1.0, 2.0, 3.0, 127.5)])
def test_erasing_paints_each_channel_in_its_own_colour(colours):
    images = make_images(len(colours))
    erasing = RandomErasing(prob=1.0, value=colours)
    parameters = draw(erasing, len(images))
    erased = erasing.apply(images, parameters)
    for channel, colour in enumerate(colours):
        alone = RandomErasing(prob=1.0, value=(colour,)).apply(images[:, channel, None], parameters)
        assert torch.equal(erased[:, channel, None], alone)
    top, left = parameters["top"][0], parameters["left"][0]
    assert erased[0, :, top, left].tolist() == [round(colour) for colour in colours]


@pytest.mark.parametrize(
    "transform",
    [
        PadAndRandomCrop(padding=3, mode="constant"),
        PadAndRandomCrop(padding=3, mode="reflect"),
        RandomHorizontalFlip(prob=0.5),
        RandomAffine(),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_geometry_treats_every_channel_alike(transform):
    images = make_images(4)
    parameters = draw(transform, len(images))
    changed = transform.apply(images, parameters)
    assert changed.shape == images.shape and not torch.equal(changed, images)
    for channel in range(4):
        alone = transform.apply(images[:, channel, None], parameters)
        assert torch.equal(changed[:, channel, None], alone)


def test_resize_treats_every_channel_alike():
    image = make_images(4)[0]
    resized = Resize(size=(64, 32))(image)
    assert resized.shape == (4, 64, 32)
    for channel in range(4):
        assert torch.equal(resized[channel, None], Resize(size=(64, 32))(image[channel, None]))


@pytest.mark.parametrize("size", [(256, 128), (12, 40)])
def test_erasing_is_distributed_as_torchvisions(size):
    count = 4000
    parameters = draw(RandomErasing(prob=1.0, value=(0, 0, 0)), count, size)
    ours = np.stack([parameters[name].numpy() for name in ("top", "left", "height", "width")]).T
    image = torch.zeros(3, *size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = np.array(
            [tv.RandomErasing.get_params(image, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(count)]
        )
    # torchvision answers "the whole image" where ten rectangles did not fit; ours has no height there.
    assert (ours[:, 2] == 0).mean() == pytest.approx((theirs[:, 2] == size[0]).mean(), abs=0.02)
    ours, theirs = ours[ours[:, 2] > 0], theirs[theirs[:, 2] < size[0]]
    quantiles = np.linspace(0.05, 0.95, 10)
    for column in range(4):
        difference = np.quantile(ours[:, column], quantiles) - np.quantile(theirs[:, column], quantiles)
        assert np.abs(difference).max() <= max(1, 0.05 * size[column % 2])
    ratio = np.log(ours[:, 2] / ours[:, 3]).mean() - np.log(theirs[:, 2] / theirs[:, 3]).mean()
    assert abs(ratio) < 0.05
    assert (ours[:, 0] + ours[:, 2]).max() <= size[0] and (ours[:, 1] + ours[:, 3]).max() <= size[1]
    assert ours.min() >= 0


def test_erasing_probability(images):
    parameters = draw(RandomErasing(prob=0.3, value=(0, 0, 0)), 5000)
    assert (parameters["height"] > 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    nothing = draw(RandomErasing(prob=0.0, value=(0, 0, 0)), len(images))
    assert torch.equal(RandomErasing(prob=0.0, value=(0, 0, 0)).apply(images, nothing), images)


def test_erasing_where_nothing_fits():
    """An image of one pixel: torchvision leaves it whole too."""
    parameters = draw(RandomErasing(prob=1.0, value=(0, 0, 0)), 50, size=(1, 1))
    assert parameters["height"].sum() == 0


def as_torchvision(image, parameters, index):
    """Jitter one image with torchvision's functions."""
    if not parameters["jitter"][index]:
        return image
    names = ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue")
    adjust = [getattr(v2.functional, name) for name in names]
    for number in parameters["order"][index].tolist():
        image = adjust[number](image, parameters["factors"][index, number].item())
    return image


@pytest.mark.parametrize("channels", [1, 3])
def test_colour_jitter_equals_torchvision(channels):
    images = make_images(channels).repeat(6, 1, 1, 1)
    jitter = ColorJitter(prob=0.8, **JITTER)
    parameters = draw(jitter, len(images))
    jittered = jitter.apply(images, parameters)
    expected = torch.stack([as_torchvision(image, parameters, index) for index, image in enumerate(images)])
    difference = (jittered.int() - expected.int()).abs()
    # One unit of rounding grows to a few in a turn of the hue or a blend with a large factor, in a few pixels.
    assert difference.max() <= 4
    assert (difference > 1).float().mean() < 1e-3
    assert (jittered != images).float().mean() > 0.3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("number", range(4))
def test_each_colour_operation_equals_torchvision(number, channels):
    images, names = make_images(channels), list(JITTER)
    jitter = ColorJitter(prob=1.0, **{name: JITTER[name] if i == number else 0.0 for i, name in enumerate(names)})
    parameters = draw(jitter, len(images))
    expected = torch.stack([as_torchvision(image, parameters, index) for index, image in enumerate(images)])
    assert (jitter.apply(images, parameters).int() - expected.int()).abs().max() <= 1


def test_a_turn_of_the_hue_and_saturation_leave_grey_as_it_is():
    images = make_images(1)
    jitter = ColorJitter(prob=1.0, brightness=0.0, contrast=0.0, saturation=0.8, hue=0.5)
    assert torch.equal(jitter.apply(images, draw(jitter, len(images))), images)


def test_colour_jitter_leaves_the_fourth_channel_as_it_is():
    images = make_images(4)
    before = images.clone()
    jitter = ColorJitter(prob=0.8, **JITTER)
    parameters = draw(jitter, len(images))
    jittered = jitter.apply(images, parameters)
    assert torch.equal(jittered[:, 3], images[:, 3]) and torch.equal(images, before)
    assert torch.equal(jittered[:, :3], jitter.apply(images[:, :3], parameters))
    assert not torch.equal(jittered, images)


def test_colour_jitter_draws():
    parameters = draw(ColorJitter(prob=0.5, brightness=0.15, contrast=2.0, saturation=0.1, hue=0.1), 5000)
    assert parameters["jitter"].float().mean().item() == pytest.approx(0.5, abs=0.02)
    low, high = parameters["factors"].amin(dim=0).tolist(), parameters["factors"].amax(dim=0).tolist()
    assert low == pytest.approx([0.85, 0, 0.9, -0.1], abs=5e-3)
    assert high == pytest.approx([1.15, 3, 1.1, 0.1], abs=5e-3)
    orders, counts = parameters["order"].unique(dim=0, return_counts=True)
    assert len(orders) == math.factorial(4)
    assert counts.min() > 5000 / 24 * 0.7


ALL = [
    PadAndRandomCrop(padding=3, mode="reflect"),
    RandomHorizontalFlip(prob=0.5),
    ColorJitter(prob=0.5, **JITTER),
    RandomErasing(prob=0.5, value=(1, 2, 3)),
]


def test_augmentation_does_not_depend_on_the_grouping(images):
    augmentation = Augmentation(transforms=ALL, seed=3)
    together = augmentation.apply(images, augmentation.draw([2] * len(images), range(7, 7 + len(images)), SIZE))
    for index in range(len(images)):
        alone = augmentation.apply(images[index : index + 1], augmentation.draw([2], [7 + index], SIZE))
        assert torch.equal(alone[0], together[index])


def test_one_operation_does_not_shift_the_draws_of_another(images):
    alone = Augmentation(transforms=ALL[1:2], seed=3).draw([0] * 50, range(50), SIZE)[0]
    among = Augmentation(transforms=ALL, seed=3).draw([0] * 50, range(50), SIZE)[1]
    assert torch.equal(alone["flip"], among["flip"])
    twice = Augmentation(transforms=[ALL[1], ALL[1]], seed=3).draw([0] * 50, range(50), SIZE)
    assert not torch.equal(twice[0]["flip"], twice[1]["flip"])


def test_apply_leaves_its_arguments_alone(images):
    before = images.clone()
    augmentation = Augmentation(transforms=ALL, seed=0)
    parameters = augmentation.draw([0] * len(images), range(len(images)), SIZE)
    copies = [{name: value.clone() for name, value in each.items()} for each in parameters]
    first, second = augmentation.apply(images, parameters), augmentation.apply(images, parameters)
    assert torch.equal(images, before) and torch.equal(first, second)
    assert all(
        torch.equal(each[name], copy[name]) for each, copy in zip(parameters, copies, strict=True) for name in each
    )


def test_build_follows_the_config(cfg):
    transforms = build_transforms(cfg, is_train=True)
    assert transforms.resize.size == (32, 16)
    names = [type(transform).__name__ for transform in transforms.augment.transforms]
    assert names == ["PadAndRandomCrop", "RandomHorizontalFlip", "ColorJitter", "RandomErasing"]
    assert transforms.augment.seed == 5
    assert build_transforms(cfg, is_train=False).augment.transforms == []
    for name in ("FLIP", "PADDING", "CJ", "REA"):
        cfg.INPUT[name].ENABLED = False
    assert build_transforms(cfg, is_train=True).augment.transforms == []


@pytest.mark.parametrize(
    ("channels", "value", "colour"),
    [
        (1, (123.675, 116.28, 103.53), (117,)),
        (1, (8.0,), (8,)),
        (3, (123.675, 116.28, 103.53), (124, 116, 104)),
        (4, (1.0, 2.0, 3.0, 4.0), (1, 2, 3, 4)),
    ],
)
def test_the_colour_of_erasing_follows_the_channels(cfg, channels, value, colour):
    cfg.merge_from_list(["INPUT.CHANNELS", channels, "INPUT.REA.VALUE", value])
    transforms = build_transforms(cfg, is_train=True)
    assert transforms.channels == channels and transforms.augment.transforms[-1].value == colour
    assert build_transforms(cfg, is_train=False).channels == channels


def test_a_colour_that_does_not_fit_the_channels_is_named(cfg):
    cfg.INPUT.CHANNELS = 4
    with pytest.raises(ConfigError, match=r"INPUT\.REA\.VALUE has 3 values, but INPUT\.CHANNELS is 4; expected 4"):
        build_transforms(cfg, is_train=True)
    cfg.INPUT.REA.ENABLED = False
    build_transforms(cfg, is_train=True)


def test_autoaugment_of_four_channels_is_refused(cfg):
    cfg.merge_from_list(["INPUT.CHANNELS", 4, "INPUT.REA.ENABLED", False, "INPUT.AUTOAUG.ENABLED", True])
    with pytest.raises(ConfigError, match=r"INPUT\.AUTOAUG\.ENABLED .* INPUT\.CHANNELS is 4"):
        build_transforms(cfg, is_train=True)
    build_transforms(cfg, is_train=False)
    cfg.merge_from_list(["INPUT.CHANNELS", 1, "INPUT.AUTOAUG.PROB", 0.5])
    assert isinstance(build_transforms(cfg, is_train=True).augment.transforms[0], AutoAugment)


@pytest.mark.parametrize("name", ["CROP", "AUGMIX", "RPT"])
def test_what_does_not_exist_is_refused(cfg, name):
    cfg.INPUT[name].ENABLED = True
    with pytest.raises(ConfigError, match=rf"INPUT\.{name}\.ENABLED"):
        build_transforms(cfg, is_train=True)
    build_transforms(cfg, is_train=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.SIZE_TRAIN", (256,)),
        ("INPUT.SIZE_TRAIN", (0, 0)),
        ("INPUT.PADDING.SIZE", -1),
        ("INPUT.PADDING.SIZE", 16),
        ("INPUT.REA.VALUE", (0.0, 0.0, 300.0)),
        ("INPUT.REA.VALUE", (0.5,)),
        ("INPUT.FLIP.PROB", 1.5),
        ("INPUT.CJ.HUE", 0.6),
        ("INPUT.CJ.CONTRAST", -0.1),
    ],
)
def test_values_out_of_range_are_named(cfg, key, value):
    cfg.INPUT.PADDING.MODE = "reflect"
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        cfg.merge_from_list([key, value])
        build_transforms(cfg, is_train=True)


TORCHVISIONS = {
    "autoaugment": (AutoAugment(prob=0.5), v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET)),
    "affine": (RandomAffine(), v2.RandomAffine(degrees=10, scale=(0.9, 1.1), shear=0.1)),
}


@pytest.mark.parametrize(
    ("name", "channels"), [("autoaugment", 1), ("autoaugment", 3), ("affine", 1), ("affine", 3), ("affine", 4)]
)
def test_torchvisions_transform_with_the_images_own_seed(name, channels):
    images = make_images(channels)
    ours, theirs = TORCHVISIONS[name]
    parameters = draw(ours, len(images))
    before = torch.get_rng_state()
    changed = ours.apply(images, parameters)
    assert torch.equal(torch.get_rng_state(), before)
    for index, (image, after) in enumerate(zip(images, changed, strict=True)):
        torch.manual_seed(parameters["seed"][index].item())
        assert torch.equal(after, theirs(image) if parameters["chosen"][index] else image)
    assert not torch.equal(changed, images)
    alone = ours.apply(images[3:4], {key: value[3:4] for key, value in parameters.items()})
    assert torch.equal(alone[0], changed[3])


def test_torchvisions_seeds_differ_and_the_probability_is_kept():
    parameters = draw(AutoAugment(prob=0.1), 5000)
    assert len(parameters["seed"].unique()) == 5000 and parameters["seed"].min() >= 0
    assert parameters["chosen"].float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_autoaugment_that_chooses_nothing_returns_the_images_themselves(images):
    transform = AutoAugment(prob=0.0)
    assert transform.apply(images, draw(transform, len(images))) is images


def test_autoaugment_and_affine_are_built_by_key():
    cfg = get_cfg()
    cfg.merge_from_list(["INPUT.AUTOAUG.ENABLED", "True", "INPUT.AUTOAUG.PROB", "0.1", "INPUT.AFFINE.ENABLED", "True"])
    autoaugment, affine = build_transforms(cfg).augment.transforms
    assert isinstance(autoaugment, AutoAugment) and autoaugment.prob == 0.1
    assert isinstance(affine, RandomAffine) and affine.prob == 1.0
