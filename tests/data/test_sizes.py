"""Resizing, center crops and interpolation, compared with torchvision on PIL images, and batches of any sizes."""

import itertools

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastamp.config import get_cfg
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.transforms import RandomResizedCrop, Resize, build_transforms
from fastamp.utils.errors import ConfigError, DataError

MODES = {name: v1.InterpolationMode(name) for name in ("bicubic", "bilinear", "nearest")}


def pictures():
    """Return smooth PIL images of several sizes and aspect ratios."""
    rng = np.random.default_rng(0)
    sizes = [(128, 64), (64, 128), (97, 41), (300, 200), (30, 30)]
    noise = [rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8) for height, width in sizes]
    return [Image.fromarray(n).resize((w, h), Image.Resampling.BICUBIC) for n, (h, w) in zip(noise, sizes, strict=True)]


def as_tensor(picture):
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)


def fastreids_test_pipeline(cfg, interpolation):
    """Build what FastReID's test pipeline does from torchvision: resize, then center crop."""
    size, crop = cfg.INPUT.SIZE_TEST, cfg.INPUT.CROP.SIZE
    steps = []
    if size[0] > 0:
        steps.append(v1.Resize(size[0] if len(size) == 1 else size, interpolation=interpolation))
    if cfg.INPUT.CROP.ENABLED:
        steps.append(v1.CenterCrop(crop[0] if len(crop) == 1 else crop))
    return v1.Compose(steps)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize(
    "opts",
    [
        ("INPUT.SIZE_TEST", "(64, 48)"),
        ("INPUT.SIZE_TEST", "(50,)"),
        ("INPUT.SIZE_TEST", "(0,)"),
        ("INPUT.SIZE_TEST", "(64, 64)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(56, 41)"),
        ("INPUT.SIZE_TEST", "(50,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(45,)"),
        ("INPUT.SIZE_TEST", "(0,)", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(45,)"),  # larger than one image
    ],
)
def test_test_images_are_fastreids(opts, mode):
    cfg = get_cfg()
    cfg.merge_from_list([*opts, "INPUT.INTERPOLATION", mode])
    resize = build_transforms(cfg, is_train=False).resize
    for picture in pictures():
        expected = as_tensor(fastreids_test_pipeline(cfg, MODES[mode])(picture))
        found = resize(as_tensor(picture))
        assert found.shape == expected.shape
        difference = (found.int() - expected.int()).abs()
        # Halfway between two pixels PIL's rounding decides, which adds up the step in float64.
        share = (difference > (0 if mode == "nearest" else 2)).float().mean()
        assert share <= (0.35 if mode == "nearest" else 0)


@pytest.mark.parametrize("size", [(31, 17), (200, 150), (13, 90)])
def test_nearest_takes_the_pixel_at_the_center_as_pil(size):
    for picture in pictures():
        expected = as_tensor(picture.resize(size[::-1], Image.Resampling.NEAREST))
        found = Resize(size=size, interpolation="nearest")(as_tensor(picture))
        rows, columns = (
            (2 * torch.arange(side) + 1) * before % (2 * side) != 0  # not halfway between two pixels
            for side, before in zip(size, (picture.height, picture.width), strict=True)
        )
        assert rows.sum() > 10 and torch.equal(found[:, rows][:, :, columns], expected[:, rows][:, :, columns])


def test_interpolations_differ():
    image = as_tensor(pictures()[0])
    found = [Resize(size=(256, 128), interpolation=mode)(image) for mode in MODES]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_resized_crop_interpolates_as_torchvision(mode):
    images = torch.stack([as_tensor(pictures()[0])] * 8)
    crop = RandomResizedCrop(size=(48, 20), scale=(0.05, 1.0), ratio=(0.3, 2.0), interpolation=mode)
    uniforms = np.random.default_rng(0).random((8, crop.draws))
    parameters = crop.parameters(uniforms, (128, 64))
    interpolation = {"nearest": "nearest-exact"}.get(mode, mode)
    for index, after in enumerate(crop.apply(images, parameters)):
        place = [parameters[name][index].item() for name in ("top", "left", "height", "width")]
        expected = v2.functional.resized_crop(
            images[index], *place, size=[48, 20], interpolation=v2.InterpolationMode(interpolation), antialias=True
        )
        difference = (after.int() - expected.int()).abs()
        assert difference.max() <= (0 if mode == "nearest" else 2) and difference.float().mean() < 0.1


def test_train_and_test_images_may_be_interpolated_differently():
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
def mixed(tmp_path, monkeypatch, write_image):
    """A data root with a small Market-1501 whose images have three sizes."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path))
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


@pytest.mark.parametrize("opts", ONE_NUMBER, ids=["no resize", "shorter side", "pad and crop"])
def test_images_of_different_sizes_train_together(mixed, tmp_path, opts):
    opts = (*opts, "INPUT.RPT", "True", "INPUT.AUTOAUG", "True", "INPUT.AUTOAUG.PROB", "0.5")
    found = batches(config(tmp_path, *opts))
    size = (24, 24) if "(0,)" in opts else (24, 20) if "INPUT.CROP" in opts else (32, 32)
    assert all(batch["images"].shape == (16, 3, *size) for batch in found)
    for other in (("DATALOADER.NUM_WORKERS", "2"), ("INPUT.AUGMENT_ON", "device")):
        for one, two in zip(found, batches(config(tmp_path, *opts, *other)), strict=True):
            assert torch.equal(one["images"], two["images"])
    assert len({batch["images"].float().mean().item() for batch in found}) == len(found)


def test_equal_sizes_are_augmented_alike_with_one_number_and_with_two(market, tmp_path):
    # All of these images are 64 x 32.
    opts = ("SOLVER.IMS_PER_BATCH", "8", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(40, 20)")
    two = batches(config(tmp_path, *opts, "INPUT.SIZE_TRAIN", "(64, 32)"))
    for size in ("(0,)", "(32,)"):
        for one, other in zip(batches(config(tmp_path, *opts, "INPUT.SIZE_TRAIN", size)), two, strict=True):
            assert (one["images"].int() - other["images"].int()).abs().max() <= 1


def test_images_of_one_size_need_no_resizing(market, tmp_path):
    cfg = config(tmp_path, "INPUT.SIZE_TRAIN", "(0,)", "INPUT.SIZE_TEST", "(0,)", "SOLVER.IMS_PER_BATCH", "8")
    assert batches(cfg)[0]["images"].shape == (8, 3, 64, 32)
    loader, _ = build_reid_test_loader(cfg, "Market1501")
    assert all(batch["images"].shape[1:] == (3, 64, 32) for batch in loader)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_batch_of_different_sizes_is_an_error_that_names_the_key(mixed, tmp_path, workers):
    opts = ("DATALOADER.NUM_WORKERS", workers, "INPUT.PADDING", "False")
    with pytest.raises(
        DataError, match=r"INPUT\.SIZE_TRAIN \(32,\) keeps .* different sizes: .*\n  fix: INPUT\.SIZE_T"
    ):
        batches(config(tmp_path, *opts, "INPUT.SIZE_TRAIN", "(32,)"))
    with pytest.raises(DataError, match=r"INPUT\.SIZE_TEST \(0,\)"):  # before any training
        build_reid_test_loader(config(tmp_path, *opts, "INPUT.SIZE_TEST", "(0,)"), "Market1501")


def test_test_batches_of_one_image_may_have_any_size(mixed, tmp_path):
    cfg = config(tmp_path, "INPUT.SIZE_TEST", "(16,)", "TEST.IMS_PER_BATCH", "1")
    loader, _ = build_reid_test_loader(cfg, "Market1501")
    assert {tuple(batch["images"].shape) for batch in loader} == {(1, 3, 32, 16), (1, 3, 24, 16), (1, 3, 16, 21)}


def test_a_cache_holds_test_images_as_they_are_cropped_and_interpolated(mixed, tmp_path):
    """No cache is used with another crop, size or interpolation, and each changes nothing."""
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
    assert all(torch.equal(one, images(*opts)) for one, opts in zip(found, variants, strict=True))
    assert torch.equal(found[0], found[-1]) and len({each.float().mean().item() for each in found}) == 5


def test_a_cache_needs_images_of_one_size(mixed, tmp_path):
    cfg = config(tmp_path, "INPUT.SIZE_TRAIN", "(0,)", "INPUT.CROP", "True", "DATALOADER.CACHE", "ram")
    with pytest.raises(ConfigError, match=r"DATALOADER\.CACHE ram needs images of one size, and INPUT\.SIZE_TRAIN"):
        build_reid_train_loader(cfg)


@pytest.mark.parametrize(
    ("size", "crop", "is_reported"),
    [
        ("(64, 32)", "(64, 40)", True),
        ("(40,)", "(48,)", True),
        ("(64, 32)", "(64, 32)", False),
        ("(40,)", "(40,)", False),
        ("(0,)", "(40,)", False),
    ],
)
def test_a_crop_larger_than_the_test_images_is_reported(caplog, size, crop, is_reported):
    cfg = get_cfg()
    cfg.merge_from_list(["INPUT.SIZE_TEST", size, "INPUT.CROP", "True", "INPUT.CROP.SIZE", crop])
    build_transforms(cfg, is_train=False)
    assert ("black borders" in caplog.text) == is_reported
