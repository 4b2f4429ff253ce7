"""Resizing, center crop and interpolation match torchvision on PIL images; batches of images of different sizes."""

import itertools

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastamp.config import get_cfg, read_config
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.transforms import Resize, build_transforms
from fastamp.data.transforms.geometry import RandomResizedCrop
from fastamp.utils.errors import ConfigError, DataError

MODES = {name: v1.InterpolationMode(name) for name in ("bicubic", "bilinear", "nearest")}


def sample_images():
    """Smooth PIL images of several sizes and aspect ratios."""
    rng = np.random.default_rng(0)
    sizes = [(128, 64), (64, 128), (97, 41), (300, 200), (30, 30)]
    noise = [rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8) for height, width in sizes]
    return [Image.fromarray(n).resize((w, h), Image.Resampling.BICUBIC) for n, (h, w) in zip(noise, sizes, strict=True)]


def as_tensor(image_):
    return torch.from_numpy(np.asarray(image_).copy()).permute(2, 0, 1)


def fastreid_test_pipeline(cfg, interpolation):
    """Return FastReID's test pipeline, built from torchvision: resize, then center crop."""
    size, crop = cfg.INPUT.SIZE_TEST, cfg.INPUT.CROP.SIZE
    steps = []
    if size[0] > 0:
        steps.append(v1.Resize(size[0] if len(size) == 1 else size, interpolation=interpolation))
    if cfg.INPUT.CROP.ENABLED:
        steps.append(v1.CenterCrop(crop[0] if len(crop) == 1 else crop))
    return v1.Compose(steps)


def test_test_transforms_equal_fastreid_pipeline(subtests):
    for opts in (
        ("INPUT.SIZE_TEST", "(64, 48)"),
        ("INPUT.SIZE_TEST", "(50,)"),
        ("INPUT.SIZE_TEST", "(0,)"),
        ("INPUT.SIZE_TEST", "(64, 64)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(56, 41)"),
        ("INPUT.SIZE_TEST", "(50,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(45,)"),
        ("INPUT.SIZE_TEST", "(0,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(45,)"),  # larger than one of the images
    ):
        for mode in sorted(MODES):
            with subtests.test(f"{opts} {mode}"):
                cfg = read_config("", [*opts, "INPUT.INTERPOLATION", mode])
                resize = build_transforms(cfg, is_train=False).resize
                for image_ in sample_images():
                    expected = as_tensor(fastreid_test_pipeline(cfg, MODES[mode])(image_))
                    found = resize(as_tensor(image_))
                    assert found.shape == expected.shape
                    difference = (found.int() - expected.int()).abs()
                    # Halfway between two pixels, the result depends on PIL's float64 rounding.
                    fraction_different = (difference > (0 if mode == "nearest" else 2)).float().mean()
                    assert fraction_different <= (0.35 if mode == "nearest" else 0)


@pytest.mark.parametrize("size", [(31, 17), (200, 150), (13, 90)])
def test_nearest_interpolation_samples_pixel_centers(size):
    for image_ in sample_images():
        expected = as_tensor(image_.resize(size[::-1], Image.Resampling.NEAREST))
        found = Resize(size=size, interpolation="nearest")(as_tensor(image_))
        rows, columns = (
            (2 * torch.arange(side) + 1) * before % (2 * side) != 0  # not halfway between two pixels
            for side, before in zip(size, (image_.height, image_.width), strict=True)
        )
        assert rows.sum() > 10 and torch.equal(found[:, rows][:, :, columns], expected[:, rows][:, :, columns])


def test_interpolation_modes_give_different_images():
    image = as_tensor(sample_images()[0])
    found = [Resize(size=(256, 128), interpolation=mode)(image) for mode in MODES]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("mode", sorted(MODES))
def test_resized_pixels_equal_torchvision_for_each_memory_layout(mode, subtests):
    for image_ in sample_images():
        channels_last = as_tensor(image_)
        expected = v2.functional.resize(channels_last, [256, 128], interpolation=MODES[mode], antialias=True)
        if mode == "nearest":
            expected = v2.functional.resize(channels_last, [256, 128], interpolation=v1.InterpolationMode.NEAREST_EXACT)
        frame = torch.zeros(3, image_.height + 9, image_.width + 5, dtype=torch.uint8)
        frame[:, 4:-5, 3:-2] = channels_last
        for image in (channels_last, channels_last.contiguous(), frame[:, 4:-5, 3:-2]):
            with subtests.test(size=image_.size, strides=image.stride()):
                assert torch.equal(Resize(size=(256, 128), interpolation=mode)(image), expected)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_resized_crop_interpolation_equals_torchvision(mode):
    images = torch.stack([as_tensor(sample_images()[0])] * 8)
    crop = RandomResizedCrop(size=(48, 20), scale=(0.05, 1.0), ratio=(0.3, 2.0), interpolation=mode)
    uniforms = np.random.default_rng(0).random((8, crop.draws))
    parameters = crop.parameters(uniforms, (128, 64))
    interpolation = {"nearest": "nearest-exact"}.get(mode, mode)
    for index, after in enumerate(crop.apply(images, parameters)):
        rectangle = [parameters[name][index].item() for name in ("top", "left", "height", "width")]
        expected = v2.functional.resized_crop(
            images[index], *rectangle, size=[48, 20], interpolation=v2.InterpolationMode(interpolation), antialias=True
        )
        difference = (after.int() - expected.int()).abs()
        assert difference.max() <= (0 if mode == "nearest" else 2) and difference.float().mean() < 0.1


def test_train_and_test_interpolation_can_differ():
    cfg = get_cfg()
    cfg.merge_from_list(["INPUT.INTERPOLATION_TEST", "bilinear", "INPUT.CROP", "True"])
    train, test = (build_transforms(cfg, is_train=is_train) for is_train in (True, False))
    assert train.resize.interpolation == "bicubic" and test.resize.interpolation == "bilinear"
    assert train.augment.transforms[0].interpolation == "bicubic"
    cfg.merge_from_list(["INPUT.INTERPOLATION_TEST", "same", "INPUT.INTERPOLATION", "nearest"])
    train, test = (build_transforms(cfg, is_train=is_train) for is_train in (True, False))
    assert train.resize.interpolation == test.resize.interpolation == "nearest"
    assert train.augment.transforms[0].interpolation == "nearest"


@pytest.fixture
def market_mixed_sizes(tmp_path, datasets_root, monkeypatch, write_image):
    """Data root with a small Market-1501 that has images of three sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    base = tmp_path / "Market-1501-v15.09.15"
    sizes = [(64, 32), (60, 40), (36, 48)]
    for pid in range(2, 10):
        for image in range(3):
            write_image(base / f"bounding_box_train/{pid:04d}_c{image % 3 + 1}s1_{image:06d}_00.jpg", sizes[image])
    for image in range(3):
        write_image(base / f"query/0001_c{image + 1}s1_000000_00.jpg", sizes[image])
        write_image(base / f"bounding_box_test/0001_c{image + 1}s1_000001_01.jpg", sizes[image])
    return base


def config(tmp_path, *opts):
    cfg = get_cfg()
    cfg.merge_from_list(
        tiny.tiny_options(tmp_path / "out", "DATASETS.NAMES", "Market1501", "DATASETS.TESTS", "Market1501", *opts)
    )
    return cfg


def batches(cfg, count=4):
    return list(itertools.islice(build_reid_train_loader(cfg), count))


ONE_NUMBER = [
    ("INPUT.SIZE_TRAIN", "(0,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(24,)"),
    ("INPUT.SIZE_TRAIN", "(32,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(24, 20)"),
    ("INPUT.SIZE_TRAIN", "(32,)"),  # padded and cropped to a square, as in FastReID
]


@pytest.mark.integration
@pytest.mark.parametrize("opts", ONE_NUMBER, ids=["no resize", "shorter side", "pad and crop"])
def test_training_images_of_different_sizes_form_batches(market_mixed_sizes, tmp_path, opts):
    opts = (*opts, "INPUT.RPT", "True", "INPUT.AUTOAUG", "True", "INPUT.AUTOAUG.PROB", "0.5")
    found = batches(config(tmp_path, *opts))
    size = (24, 24) if "(0,)" in opts else (24, 20) if "INPUT.CROP" in opts else (32, 32)
    assert all(batch["images"].shape == (16, 3, *size) for batch in found)
    for variant in (("DATALOADER.NUM_WORKERS", "2"), ("INPUT.AUGMENT_ON", "device")):
        for expected, actual in zip(found, batches(config(tmp_path, *opts, *variant)), strict=True):
            assert torch.equal(expected["images"], actual["images"])
    assert len({batch["images"].float().mean().item() for batch in found}) == len(found)


def test_crops_are_equal_for_equivalent_size_train_values(market, tmp_path):
    # All images are 64 x 32.
    opts = ("SOLVER.IMS_PER_BATCH", "8", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(40, 20)")
    reference = batches(config(tmp_path, *opts, "INPUT.SIZE_TRAIN", "(64, 32)"))
    for size in ("(0,)", "(32,)"):
        for actual, expected in zip(batches(config(tmp_path, *opts, "INPUT.SIZE_TRAIN", size)), reference, strict=True):
            assert (actual["images"].int() - expected["images"].int()).abs().max() <= 1


def test_size_0_loads_images_of_equal_size_without_resizing(market, tmp_path):
    cfg = config(tmp_path, "INPUT.SIZE_TRAIN", "(0,)", "INPUT.SIZE_TEST", "(0,)", "SOLVER.IMS_PER_BATCH", "8")
    assert batches(cfg)[0]["images"].shape == (8, 3, 64, 32)
    loader, _ = build_reid_test_loader(cfg, "Market1501")
    assert all(batch["images"].shape[1:] == (3, 64, 32) for batch in loader)


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.integration)])
def test_error_for_images_of_different_sizes_names_config_key(market_mixed_sizes, tmp_path, workers):
    opts = ("DATALOADER.NUM_WORKERS", workers, "INPUT.PADDING", "False")
    with pytest.raises(DataError, match=r"INPUT\.SIZE_TRAIN \(32,\).*\n  fix: .*INPUT\.SIZE_T"):
        batches(config(tmp_path, *opts, "INPUT.SIZE_TRAIN", "(32,)"))
    with pytest.raises(DataError, match=r"INPUT\.SIZE_TEST \(0,\)"):  # before any training
        build_reid_test_loader(config(tmp_path, *opts, "INPUT.SIZE_TEST", "(0,)"), "Market1501")


def test_single_image_test_batches_can_have_any_size(market_mixed_sizes, tmp_path):
    cfg = config(tmp_path, "INPUT.SIZE_TEST", "(16,)", "TEST.IMS_PER_BATCH", "1")
    loader, _ = build_reid_test_loader(cfg, "Market1501")
    assert {tuple(batch["images"].shape) for batch in loader} == {(1, 3, 32, 16), (1, 3, 24, 16), (1, 3, 16, 21)}


def test_cache_depends_on_crop_and_interpolation(market_mixed_sizes, tmp_path):
    """Each combination has a separate cache, which contains the same images as without a cache."""
    variants = [
        ("INPUT.SIZE_TEST", "(24, 24)"),
        ("INPUT.SIZE_TEST", "(24, 24)", "INPUT.INTERPOLATION", "bilinear"),
        ("INPUT.SIZE_TEST", "(24, 24)", "INPUT.INTERPOLATION_TEST", "nearest"),
        ("INPUT.SIZE_TEST", "(30, 30)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "24"),
        ("INPUT.SIZE_TEST", "(30,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "24"),
        ("INPUT.SIZE_TEST", "(24, 24)"),
    ]

    def images(*opts):
        loader, _ = build_reid_test_loader(config(tmp_path, *opts), "Market1501")
        return next(iter(loader))["images"]

    found = [images(*opts, "DATALOADER.CACHE", "disk") for opts in variants]
    assert all(torch.equal(cached, images(*opts)) for cached, opts in zip(found, variants, strict=True))
    assert torch.equal(found[0], found[-1]) and len({batch.float().mean().item() for batch in found}) == 5


def test_cache_without_fixed_image_size_raises(market_mixed_sizes, tmp_path):
    cfg = config(tmp_path, "INPUT.SIZE_TRAIN", "(0,)", "INPUT.CROP", "True", "DATALOADER.CACHE", "ram")
    with pytest.raises(ConfigError, match=r"DATALOADER\.CACHE ram.*INPUT\.SIZE_TRAIN \(0,\)"):
        build_reid_train_loader(cfg)


@pytest.mark.parametrize(
    ("size", "crop", "warns"),
    [
        ("(64, 32)", "(64, 40)", True),
        ("(40,)", "(48,)", True),
        ("(64, 32)", "(64, 32)", False),
        ("(40,)", "(40,)", False),
        ("(0,)", "(40,)", False),
    ],
)
def test_crop_larger_than_test_images_warns(caplog, size, crop, warns):
    cfg = read_config("", ["INPUT.SIZE_TEST", size, "INPUT.CROP", "True", "INPUT.CROP.SIZE", crop])
    build_transforms(cfg, is_train=False)
    assert ("INPUT.CROP.SIZE" in caplog.text) == warns
