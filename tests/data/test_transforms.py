import itertools
import math

import numpy as np
import pytest
import torch
import torchvision.transforms as tv
import torchvision.transforms.functional as tvf
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2

from fastamp.config import Key, get_cfg, read_config
from fastamp.data.transforms import TRANSFORM_REGISTRY, Augmentation, BatchTransform, Resize, build_transforms
from fastamp.data.transforms.base import on_device, upload
from fastamp.data.transforms.build import ORDER
from fastamp.data.transforms.color import ColorJitter, GaussianBlur, RandomGrayscale
from fastamp.data.transforms.erasing import LocalGrayscale, RandomErasing, RandomPatch
from fastamp.data.transforms.geometry import PadAndRandomCrop, RandomHorizontalFlip, RandomResizedCrop
from fastamp.data.transforms.torchvision_ops import AugMix, AutoAugment, RandAugment, RandomAffine
from fastamp.utils.errors import ConfigError

SIZE = (40, 24)
JITTER = {"brightness": 0.5, "contrast": 0.5, "saturation": 0.8, "hue": 0.5}


@pytest.fixture
def images():
    return make_images()


def make_images(channels=3):
    """Return noise, a color ramp, black, white and gray images; a fourth channel is noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 3, *SIZE), dtype=torch.uint8, generator=generator)
    ramp = torch.linspace(0, 255, SIZE[1]).expand(3, *SIZE) * torch.tensor([1.0, 0.5, 0.2]).view(3, 1, 1)
    flat = torch.tensor([0, 255, 128], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, *SIZE)
    colors = torch.cat((noise, ramp.to(torch.uint8)[None], flat))
    fourth = torch.randint(0, 256, (len(colors), 1, *SIZE), dtype=torch.uint8, generator=generator)
    return torch.cat((colors, fourth), dim=1)[:, :channels]


def draw(transform, count, size=SIZE, seed=0):
    (parameters,) = Augmentation(transforms=[transform], seed=seed).draw([0] * count, range(count), size)
    return parameters


def test_resize_equals_pil(subtests):
    for source in ((128, 64), (256, 128), (97, 41), (300, 180), (20, 333)):
        with subtests.test(source):
            pixels = np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(pixels).resize((source[1] // 4, source[0] // 4)).resize(source[::-1]))
            for array in (pixels, smooth):
                actual = Resize(size=(256, 128))(torch.from_numpy(array.copy()).permute(2, 0, 1))
                pil = np.asarray(Image.fromarray(array).resize((128, 256), Image.Resampling.BICUBIC))
                assert actual.shape == (3, 256, 128) and actual.dtype == torch.uint8
                difference = np.abs(actual.permute(1, 2, 0).numpy().astype(int) - pil)
                # Both round after each direction, so that a difference of 1 can become 2.
                assert difference.max() <= 2 and (difference > 1).mean() < 1e-3 and difference.mean() < 0.05


def test_flip_mirrors_selected_images(images):
    flip = torch.arange(len(images)) % 2 == 0
    flipped = RandomHorizontalFlip(prob=0.5).apply(images, {"flip": flip})
    for before, after, mirrored in zip(images, flipped, flip, strict=True):
        assert torch.equal(after, tvf.hflip(before) if mirrored else before)


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_flip_rate_matches_probability(prob):
    assert draw(RandomHorizontalFlip(prob=prob), 5000)["flip"].float().mean().item() == pytest.approx(prob, abs=0.02)


def test_pad_and_crop_equals_torchvision(images, subtests):
    for padding in (0, 1, 10, 23):
        for mode in ("constant", "edge", "reflect", "symmetric"):
            with subtests.test(f"{padding} {mode}"):
                crop = PadAndRandomCrop(padding=padding, mode=mode)
                parameters = draw(crop, len(images))
                cropped = crop.apply(images, parameters)
                for index, (before, after) in enumerate(zip(images, cropped, strict=True)):
                    pil = tvf.pad(tvf.to_pil_image(before), padding, padding_mode=mode)
                    top, left = parameters["top"][index].item(), parameters["left"][index].item()
                    assert torch.equal(after, tvf.crop(tvf.pil_to_tensor(pil), top, left, *SIZE))


@pytest.mark.parametrize("size", [(5, 60), (70, 4), (46, 30)])
def test_black_crop_of_another_size_equals_pil(images, size):
    """Crops outside of the image are black."""
    crop = PadAndRandomCrop(padding=20, mode="constant", size=size)
    top, left = torch.tensor([0, 80 - size[0]] * len(images)), torch.tensor([64 - size[1], 0] * len(images))
    parameters = {"top": top[: len(images)], "left": left[: len(images)]}
    for index, (before, after) in enumerate(zip(images, crop.apply(images, parameters), strict=True)):
        pil = tvf.pad(tvf.to_pil_image(before), 20)
        corner = parameters["top"][index].item(), parameters["left"][index].item()
        assert torch.equal(after, tvf.crop(tvf.pil_to_tensor(pil), *corner, *size))


def test_crop_positions_are_uniform():
    parameters = draw(PadAndRandomCrop(padding=2, mode="constant"), 10_000)
    for name in ("top", "left"):
        assert parameters[name].bincount(minlength=5).tolist() == pytest.approx([2000] * 5, abs=200)
    assert len(parameters["top"].bincount()) == 5


def test_erasing_fills_the_rectangle_with_the_rounded_color(images):
    erasing = RandomErasing(prob=1.0, value=(123.675, 116.28, 103.53))
    parameters = draw(erasing, len(images))
    erased = erasing.apply(images, parameters)
    color = torch.tensor([124, 116, 104], dtype=torch.uint8).view(3, 1, 1)
    for index, (before, after) in enumerate(zip(images, erased, strict=True)):
        rectangle = [parameters[name][index].item() for name in ("top", "left", "height", "width")]
        assert rectangle[2] > 0 and rectangle[3] > 0
        assert torch.equal(after, tvf.erase(before, *rectangle, color))


@pytest.mark.parametrize("colors", [(117.04,), (1.0, 2.0, 3.0, 127.5)])
def test_erasing_fills_each_channel_with_its_value(colors):
    images = make_images(len(colors))
    erasing = RandomErasing(prob=1.0, value=colors)
    parameters = draw(erasing, len(images))
    erased = erasing.apply(images, parameters)
    for channel, color in enumerate(colors):
        single = RandomErasing(prob=1.0, value=(color,)).apply(images[:, channel, None], parameters)
        assert torch.equal(erased[:, channel, None], single)
    top, left = parameters["top"][0], parameters["left"][0]
    assert erased[0, :, top, left].tolist() == [round(color) for color in colors]


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
def test_geometric_transforms_treat_all_channels_equally(transform):
    images = make_images(4)
    parameters = draw(transform, len(images))
    changed = transform.apply(images, parameters)
    assert changed.shape == images.shape and not torch.equal(changed, images)
    for channel in range(4):
        single = transform.apply(images[:, channel, None], parameters)
        assert torch.equal(changed[:, channel, None], single)


def test_resize_treats_all_channels_equally():
    image = make_images(4)[0]
    resized = Resize(size=(64, 32))(image)
    assert resized.shape == (4, 64, 32)
    for channel in range(4):
        assert torch.equal(resized[channel, None], Resize(size=(64, 32))(image[channel, None]))


@pytest.mark.parametrize("size", [(256, 128), (12, 40)])
def test_erasing_distribution_equals_torchvision(size):
    count = 4000
    parameters = draw(RandomErasing(prob=1.0, value=(0, 0, 0)), count, size)
    actual = np.stack([parameters[name].numpy() for name in ("top", "left", "height", "width")]).T
    image = torch.zeros(3, *size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected_values = np.array(
            [tv.RandomErasing.get_params(image, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(count)]
        )
    # After ten failed attempts torchvision returns the whole image, and ours has height 0.
    assert (actual[:, 2] == 0).mean() == pytest.approx((expected_values[:, 2] == size[0]).mean(), abs=0.02)
    actual, expected_values = actual[actual[:, 2] > 0], expected_values[expected_values[:, 2] < size[0]]
    quantiles = np.linspace(0.05, 0.95, 10)
    for column in range(4):
        difference = np.quantile(actual[:, column], quantiles) - np.quantile(expected_values[:, column], quantiles)
        assert np.abs(difference).max() <= max(1, 0.05 * size[column % 2])
    ratio = np.log(actual[:, 2] / actual[:, 3]).mean() - np.log(expected_values[:, 2] / expected_values[:, 3]).mean()
    assert abs(ratio) < 0.05
    assert (actual[:, 0] + actual[:, 2]).max() <= size[0] and (actual[:, 1] + actual[:, 3]).max() <= size[1]
    assert actual.min() >= 0


def test_erasing_rate_matches_probability(images):
    parameters = draw(RandomErasing(prob=0.3, value=(0, 0, 0)), 5000)
    assert (parameters["height"] > 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    nothing = draw(RandomErasing(prob=0.0, value=(0, 0, 0)), len(images))
    assert torch.equal(RandomErasing(prob=0.0, value=(0, 0, 0)).apply(images, nothing), images)


def test_erasing_leaves_one_pixel_images_unchanged():
    """No rectangle fits; torchvision does not erase either."""
    parameters = draw(RandomErasing(prob=1.0, value=(0, 0, 0)), 50, size=(1, 1))
    assert parameters["height"].sum() == 0


def as_torchvision(image, parameters, index):
    """Jitter the colors of one image with torchvision's functions."""
    if not parameters["jitter"][index]:
        return image
    names = ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue")
    adjust = [getattr(v2.functional, name) for name in names]
    for number in parameters["order"][index].tolist():
        image = adjust[number](image, parameters["factors"][index, number].item())
    return image


@pytest.mark.parametrize("channels", [1, 3])
def test_color_jitter_equals_torchvision(channels):
    images = make_images(channels).repeat(6, 1, 1, 1)
    jitter = ColorJitter(prob=0.8, **JITTER)
    parameters = draw(jitter, len(images))
    jittered = jitter.apply(images, parameters)
    expected = torch.stack([as_torchvision(image, parameters, index) for index, image in enumerate(images)])
    difference = (jittered.int() - expected.int()).abs()
    # Hue shifts and large factors amplify rounding differences in a few pixels.
    assert difference.max() <= 4
    assert (difference > 1).float().mean() < 1e-3
    assert (jittered != images).float().mean() > 0.3


def test_each_color_operation_equals_torchvision(subtests):
    for number in range(4):
        for channels in (1, 3):
            with subtests.test(f"{number} {channels}"):
                images, names = make_images(channels), list(JITTER)
                jitter = ColorJitter(
                    prob=1.0, **{name: JITTER[name] if i == number else 0.0 for i, name in enumerate(names)}
                )
                parameters = draw(jitter, len(images))
                expected = torch.stack([as_torchvision(image, parameters, index) for index, image in enumerate(images)])
                assert (jitter.apply(images, parameters).int() - expected.int()).abs().max() <= 1


def test_hue_and_saturation_do_not_change_grayscale():
    images = make_images(1)
    jitter = ColorJitter(prob=1.0, brightness=0.0, contrast=0.0, saturation=0.8, hue=0.5)
    assert torch.equal(jitter.apply(images, draw(jitter, len(images))), images)


def test_color_jitter_does_not_change_the_fourth_channel():
    images = make_images(4)
    before = images.clone()
    jitter = ColorJitter(prob=0.8, **JITTER)
    parameters = draw(jitter, len(images))
    jittered = jitter.apply(images, parameters)
    assert torch.equal(jittered[:, 3], images[:, 3]) and torch.equal(images, before)
    assert torch.equal(jittered[:, :3], jitter.apply(images[:, :3], parameters))
    assert not torch.equal(jittered, images)


def test_color_jitter_parameters_cover_configured_ranges():
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


def test_augmentation_of_an_image_does_not_depend_on_its_batch(images):
    augmentation = Augmentation(transforms=ALL, seed=3)
    together = augmentation.apply(images, augmentation.draw([2] * len(images), range(7, 7 + len(images)), SIZE))
    for index in range(len(images)):
        single = augmentation.apply(images[index : index + 1], augmentation.draw([2], [7 + index], SIZE))
        assert torch.equal(single[0], together[index])


def test_random_numbers_of_transforms_are_independent(images):
    single = Augmentation(transforms=ALL[1:2], seed=3).draw([0] * 50, range(50), SIZE)[0]
    with_others = Augmentation(transforms=ALL, seed=3).draw([0] * 50, range(50), SIZE)[1]
    assert torch.equal(single["flip"], with_others["flip"])
    twice = Augmentation(transforms=[ALL[1], ALL[1]], seed=3).draw([0] * 50, range(50), SIZE)
    assert not torch.equal(twice[0]["flip"], twice[1]["flip"])


def test_augmentation_does_not_modify_input_images_or_parameters(images):
    before = images.clone()
    augmentation = Augmentation(transforms=ALL, seed=0)
    parameters = augmentation.draw([0] * len(images), range(len(images)), SIZE)
    copies = [{name: value.clone() for name, value in parameter.items()} for parameter in parameters]
    first, second = augmentation.apply(images, parameters), augmentation.apply(images, parameters)
    assert torch.equal(images, before) and torch.equal(first, second)
    assert all(
        torch.equal(drawn[name], copy[name]) for drawn, copy in zip(parameters, copies, strict=True) for name in drawn
    )


def test_enabled_transforms_are_built_from_config(cfg):
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
    ("channels", "value", "color"),
    [
        (1, (123.675, 116.28, 103.53), (117,)),
        (1, (8.0,), (8,)),
        (3, (123.675, 116.28, 103.53), (124, 116, 104)),
        (4, (1.0, 2.0, 3.0, 4.0), (1, 2, 3, 4)),
    ],
)
def test_erasing_value_is_converted_to_input_channels(cfg, channels, value, color):
    cfg.merge_from_list(["INPUT.CHANNELS", channels, "INPUT.REA.VALUE", value])
    transforms = build_transforms(cfg, is_train=True)
    assert transforms.channels == channels and transforms.augment.transforms[-1].value == color
    assert build_transforms(cfg, is_train=False).channels == channels


def test_erasing_value_with_wrong_channel_count_raises(cfg):
    cfg.INPUT.CHANNELS = 4
    with pytest.raises(ConfigError, match=r"INPUT\.REA\.VALUE .*INPUT\.CHANNELS"):
        build_transforms(cfg, is_train=True)
    cfg.INPUT.REA.ENABLED = False
    build_transforms(cfg, is_train=True)


def test_autoaugment_with_four_channels_raises(cfg):
    cfg.merge_from_list(["INPUT.CHANNELS", 4, "INPUT.REA.ENABLED", False, "INPUT.AUTOAUG.ENABLED", True])
    with pytest.raises(ConfigError, match=r"(?s)INPUT\.AUTOAUG .*INPUT\.CHANNELS is 4.*fix: .*INPUT\.AUTOAUG\.ENABLED"):
        build_transforms(cfg, is_train=True)
    build_transforms(cfg, is_train=False)
    cfg.merge_from_list(["INPUT.CHANNELS", 1, "INPUT.AUTOAUG.PROB", 0.5])
    assert isinstance(build_transforms(cfg, is_train=True).augment.transforms[0], AutoAugment)


@pytest.mark.parametrize("name", ["RANDAUG", "AUGMIX"])
def test_randaugment_and_augmix_with_four_channels_raise(cfg, name):
    cfg.merge_from_list([f"INPUT.{name}", True, "INPUT.CHANNELS", 4])
    with pytest.raises(ConfigError, match=f"INPUT.{name} .*INPUT.CHANNELS is 4"):
        build_transforms(cfg)


@pytest.mark.parametrize(
    ("key", "value"),
    [
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
def test_value_out_of_range_raises_with_config_key(cfg, key, value):
    cfg.INPUT.PADDING.MODE = "reflect"
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        cfg.merge_from_list([key, value])
        build_transforms(cfg, is_train=True)


TORCHVISION_TRANSFORMS = {
    "autoaugment": (AutoAugment(prob=0.5), v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET)),
    "affine": (RandomAffine(), v2.RandomAffine(degrees=10, scale=(0.9, 1.1), shear=0.1)),
    "augmix": (AugMix(prob=0.5), v2.AugMix()),
    **{
        f"randaugment {magnitude}": (
            RandAugment(prob=0.5, num_ops=3, magnitude=magnitude),
            v2.RandAugment(num_ops=3, magnitude=magnitude),
        )
        for magnitude in (0, 9, 30)
    },
}


def test_torchvision_transform_is_seeded_per_image(subtests):
    for name, channels in (*itertools.product(TORCHVISION_TRANSFORMS, (1, 3)), ("affine", 4)):
        with subtests.test(f"{name} {channels}"):
            images = make_images(channels).repeat(8, 1, 1, 1)
            actual, expected_values = TORCHVISION_TRANSFORMS[name]
            parameters = draw(actual, len(images))
            before = torch.get_rng_state()
            changed = actual.apply(images, parameters)
            assert torch.equal(torch.get_rng_state(), before)
            for index, (image, after) in enumerate(zip(images, changed, strict=True)):
                torch.manual_seed(parameters["seed"][index].item())
                assert torch.equal(after, expected_values(image) if parameters["chosen"][index] else image)
            assert not torch.equal(changed, images)
            single = actual.apply(images[3:4], {key: value[3:4] for key, value in parameters.items()})
            assert torch.equal(single[0], changed[3])


def build_all(*names):
    """Build the transforms with the given config sections, with a probability of 0.7 for each image."""
    cfg = get_cfg()
    cfg.merge_from_list([word for name in names for word in (f"INPUT.{name}.ENABLED", "True")])
    cfg.INPUT.SIZE_TRAIN = cfg.INPUT.CROP.SIZE = SIZE
    for name in names:
        if "PROB" in cfg.INPUT[name]:
            cfg.INPUT[name].PROB = 0.7
    return build_transforms(cfg).augment


def test_augmentation_depends_only_on_epoch_position_and_seed(images, subtests):
    for name in TRANSFORM_REGISTRY:
        with subtests.test(name):
            augment, count = build_all(name), len(images)
            results = []
            for seed in (1, 2):  # the global generator has no effect and is not changed
                torch.manual_seed(seed)
                state = torch.get_rng_state()
                results.append(augment.apply(images, augment.draw([3] * count, range(count), SIZE)))
                assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(*results)
            assert not torch.equal(results[0], augment.apply(images, augment.draw([4] * count, range(count), SIZE)))


def test_applying_transforms_draws_no_random_numbers(images, subtests):
    for name in TRANSFORM_REGISTRY:
        with subtests.test(name):
            augment = build_all(name)
            parameters = augment.draw([0] * len(images), range(len(images)), SIZE)
            with NoDraws():
                augment.apply(images, parameters)


class NoDraws(TorchDispatchMode):
    """Context manager that fails if a PyTorch operation draws random numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.Tag.nondeterministic_seeded not in func.tags, func
        return func(*args, **(kwargs or {}))


def test_uploaded_augmentation_parameters_equal_parameters_on_the_host(images):
    augment = build_all(*TRANSFORM_REGISTRY)
    parameters = augment.draw([0] * len(images), range(len(images)), SIZE)
    uploaded = upload(parameters, torch.device("cpu"))
    for transferred, host in zip(uploaded, parameters, strict=True):
        assert transferred == host
        copies = on_device(transferred, torch.device("cpu"))
        assert [*copies] == [*host]
        for name, value in host.items():
            assert copies[name] is not value and copies[name].dtype == value.dtype
            assert torch.equal(copies[name], value)
    assert torch.equal(augment.apply(images, uploaded), augment.apply(images, parameters))
    assert upload([], torch.device("cpu")) == []


def test_torchvision_transform_selects_images_with_unique_seeds_at_given_rate():
    parameters = draw(AutoAugment(prob=0.1), 5000)
    assert len(parameters["seed"].unique()) == 5000 and parameters["seed"].min() >= 0
    assert parameters["chosen"].float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_autoaugment_returns_its_input_if_no_image_is_selected(images):
    transform = AutoAugment(prob=0.0)
    assert transform.apply(images, draw(transform, len(images))) is images


def test_autoaugment_and_affine_are_built_from_config():
    cfg = read_config("", [
        "INPUT.AUTOAUG.ENABLED", "True", "INPUT.AUTOAUG.PROB", "0.1", "INPUT.AFFINE.ENABLED", "True",
    ])  # fmt: skip
    autoaugment, affine = build_transforms(cfg).augment.transforms
    assert isinstance(autoaugment, AutoAugment) and autoaugment.prob == 0.1
    assert isinstance(affine, RandomAffine) and affine.prob == 1.0


def test_resized_crop_equals_torchvision(images):
    crop = RandomResizedCrop(size=(48, 20), scale=(0.05, 1.0), ratio=(0.3, 2.0))
    for seed in range(5):
        parameters = draw(crop, len(images), seed=seed)
        changed = crop.apply(images, parameters)
        assert changed.shape == (len(images), 3, 48, 20) and changed.dtype == torch.uint8
        for index, (before, after) in enumerate(zip(images, changed, strict=True)):
            place = [parameters[name][index].item() for name in ("top", "left", "height", "width")]
            expected = v2.functional.resized_crop(
                before, *place, size=[48, 20], interpolation=v2.InterpolationMode.BICUBIC, antialias=True
            )
            difference = (after.int() - expected.int()).abs()
            assert difference.max() <= 2 and difference.float().mean() < 0.1


@pytest.mark.parametrize("size, ratio", [((64, 64), (0.75, 4 / 3)), ((256, 128), (0.3, 0.6)), ((90, 8), (0.75, 4 / 3))])
def test_resized_crop_distribution_equals_torchvision(size, ratio):
    crop = RandomResizedCrop(size=(8, 8), scale=(0.16, 1.0), ratio=ratio)
    actual = draw(crop, 4000, size=size)
    image = torch.empty(1, *size)
    expected_values = torch.tensor(
        [tv.RandomResizedCrop.get_params(image, [0.16, 1.0], list(ratio)) for _ in range(4000)]
    )
    for name, column in zip(("top", "left", "height", "width"), expected_values.T.double(), strict=True):
        values = actual[name].double()
        assert values.mean() == pytest.approx(column.mean().item(), abs=0.02 * max(size))
        assert values.std() == pytest.approx(column.std().item(), abs=0.02 * max(size))
    assert (actual["top"] + actual["height"]).max() <= size[0] and (actual["left"] + actual["width"]).max() <= size[1]


def test_transforms_after_resized_crop_use_the_crop_size(cfg):
    cfg.merge_from_list(["INPUT.CROP", True, "INPUT.CROP.SIZE", "(30, 60)", "INPUT.REA", True, "INPUT.REA.PROB", 1.0])
    augment = build_transforms(cfg).augment
    images = torch.zeros(200, 3, 256, 128, dtype=torch.uint8)
    parameters = augment.draw([0] * 200, range(200), (256, 128))
    rectangle = parameters[-1]
    assert (rectangle["top"] + rectangle["height"]).max() <= 30
    assert 40 < (rectangle["left"] + rectangle["width"]).max() <= 60
    assert augment.apply(images[:8], [{k: v[:8] for k, v in p.items()} for p in parameters]).shape == (8, 3, 30, 60)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_grayscale_equals_torchvision(channels):
    images = make_images(channels)
    chosen = torch.arange(len(images)) % 3 == 0
    changed = RandomGrayscale(prob=0.5).apply(images, {"grayscale": chosen})
    for before, after, gray in zip(images, changed, chosen, strict=True):
        expected = before.clone()
        if gray and channels > 1:
            expected[:3] = v2.functional.rgb_to_grayscale(before[:3], num_output_channels=3)
        assert torch.equal(after, expected)


def test_blur_equals_torchvision(subtests):
    for kernel_size in (3, 9):
        for channels in (1, 3):
            with subtests.test(f"{kernel_size} {channels}"):
                images = make_images(channels)
                blur = GaussianBlur(prob=0.7, kernel_size=kernel_size, sigma=(0.1, 3.0))
                parameters = draw(blur, len(images))
                assert parameters["blur"].any() and not parameters["blur"].all()
                changed = blur.apply(images, parameters)
                for index, (before, after) in enumerate(zip(images, changed, strict=True)):
                    expected = before
                    if parameters["blur"][index]:
                        near, middle = parameters["kernel"][index][kernel_size // 2 - 1 : kernel_size // 2 + 1].double()
                        sigma = (1 / (2 * (middle / near).log())).sqrt().item()
                        expected = v2.functional.gaussian_blur(before, [kernel_size, kernel_size], [sigma, sigma])
                    assert (after.int() - expected.int()).abs().max() <= 1


def test_local_grayscale_changes_only_the_rectangle(images):
    local = LocalGrayscale(prob=1.0)
    parameters = draw(local, len(images))
    changed = local.apply(images, parameters)
    gray = v2.functional.rgb_to_grayscale(images, num_output_channels=3)
    for index, (before, after) in enumerate(zip(images, changed, strict=True)):
        top, left, height, width = (parameters[name][index].item() for name in ("top", "left", "height", "width"))
        expected = before.clone()
        part = (slice(None), slice(top, top + height), slice(left, left + width))
        expected[part] = gray[index][part]
        assert height > 0 and torch.equal(after, expected)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_random_patch_pastes_a_patch_from_another_image(channels):
    images = make_images(channels)
    patch = RandomPatch(prob=0.8)
    parameters = draw(patch, len(images))
    changed = patch.apply(images, parameters)
    assert set(parameters["flip"].tolist()) == {True, False}
    for index, (before, after) in enumerate(zip(images, changed, strict=True)):
        top, left, height, width, row, column, other = (
            parameters[name][index].item()
            for name in ("top", "left", "height", "width", "from_top", "from_left", "other")
        )
        assert other != index
        part = images[other][:, row : row + height, column : column + width]
        expected = before.clone()
        expected[:, top : top + height, left : left + width] = part.flip(-1) if parameters["flip"][index] else part
        assert torch.equal(after, expected)


def test_random_patch_accepts_a_batch_of_one_image():
    images = make_images()[:1]
    patch = RandomPatch(prob=1.0)
    assert patch.apply(images, draw(patch, 1)).shape == images.shape


def test_all_transforms_are_built_in_order_of_application(cfg):
    names = ["AUTOAUG", "RANDAUG", "CROP", "PADDING", "FLIP", "CJ", "GRAYSCALE", "BLUR", "AFFINE", "AUGMIX", "REA"]
    names += ["LOCAL_GRAYSCALE", "RPT"]
    cfg.merge_from_list([word for name in names for word in (f"INPUT.{name}", True)])
    cfg.merge_from_list(["INPUT.AUTOAUG.PROB", 0.5, "INPUT.AUGMIX.PROB", 0.5])
    transforms = build_transforms(cfg).augment.transforms
    expected = [AutoAugment, RandAugment, RandomResizedCrop, PadAndRandomCrop, RandomHorizontalFlip, ColorJitter]
    expected += [RandomGrayscale, GaussianBlur, RandomAffine, AugMix, RandomErasing, LocalGrayscale, RandomPatch]
    assert [type(transform) for transform in transforms] == expected


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("BLUR.KERNEL_SIZE", 4, r"KERNEL_SIZE.* 4\b"),
        ("BLUR.KERNEL_SIZE", 301, "at most 31"),
        ("BLUR.SIGMA", "(2.0, 1.0)", "INPUT.BLUR.SIGMA"),
        ("CROP.SCALE", "(0.5, 0.2)", "INPUT.CROP.SCALE"),
        ("CROP.RATIO", "(2.0, 0.2)", "INPUT.CROP.RATIO"),
    ],
)
def test_invalid_blur_and_crop_settings_raise(cfg, key, value, message):
    cfg.merge_from_list([f"INPUT.{key.split('.')[0]}", True, f"INPUT.{key}", value])
    with pytest.raises(ConfigError, match=message):
        build_transforms(cfg)


# ---- the registry


def test_every_transform_is_in_order_and_disabled_by_default():
    assert sorted(ORDER) == list(TRANSFORM_REGISTRY)
    for name in ORDER:
        assert get_cfg().INPUT[name].ENABLED is False


@pytest.fixture
def custom_transform(monkeypatch):
    """Register a custom transform; return its class and a config with keys for it and for built-in transforms."""
    monkeypatch.setattr(TRANSFORM_REGISTRY, "_components", dict(TRANSFORM_REGISTRY._components))

    @TRANSFORM_REGISTRY.register("DARKEN")
    class Darken(BatchTransform):
        draws = 1

        @classmethod
        def from_config(cls, cfg):
            return cls()

    cfg = get_cfg()
    cfg.define("INPUT.DARKEN.ENABLED", False, "Darken training images.")
    cfg.merge_from_list(["INPUT.FLIP", "True", "INPUT.REA", "True", "INPUT.RPT", "True"])
    return Darken, cfg


@pytest.mark.parametrize(("before", "place"), [("", 3), ("REA", 1), ("AUTOAUG", 0)])
def test_custom_transform_is_inserted_before_transform_named_in_before(custom_transform, before, place):
    transform, cfg = custom_transform
    transform.before = before
    others = ["RandomHorizontalFlip", "RandomErasing", "RandomPatch"]
    names = [type(transform).__name__ for transform in build_transforms(cfg).augment.transforms]
    assert names == others
    cfg.INPUT.DARKEN.ENABLED = True
    names = [type(transform).__name__ for transform in build_transforms(cfg).augment.transforms]
    assert names == [*others[:place], "Darken", *others[place:]]
    assert build_transforms(cfg, is_train=False).augment.transforms == []


@pytest.mark.parametrize("keys", [(), (Key("INPUT.DARKEN.PROB", 0.5, "Probability."),)])
def test_custom_transform_without_enabled_key_raises(custom_transform, keys):
    cfg = get_cfg()
    cfg.add_keys(keys)
    with pytest.raises(ConfigError, match=r"INPUT\.DARKEN\.ENABLED(.|\n)*fix: "):
        build_transforms(cfg)
    build_transforms(cfg, is_train=False)


def test_unknown_before_of_custom_transform_suggests_similar_name(custom_transform):
    transform, cfg = custom_transform
    transform.before = "REAA"
    with pytest.raises(ConfigError, match=r"Darken\.before: .*'REAA'.*'REA'"):
        build_transforms(cfg)
