"""Large images: pixel limit, PIL's warning, and decoding of JPEG files at reduced size."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import fastamp
from fastamp.config import get_cfg, read_config
from fastamp.data import decode
from fastamp.data.datasets.base import ImageDataset
from fastamp.data.decode import LARGEST_PIXELS, MAX_PIXELS, read_image
from fastamp.data.transforms import build_transforms
from fastamp.diagnostics.data_check import check_dataset
from fastamp.utils.errors import ConfigError, DataError

NAMES = ["a.jpg", "a.png", "a.bmp"]


def smooth(height, width):
    noise = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def transforms(*opts):
    cfg = read_config("", opts)
    return build_transforms(cfg, is_train=False)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """JPEG file that is decoded at reduced size, because the test lowers the threshold for it."""
    assert decode._MAX_FULL_SIZE_PIXELS == 2**24
    monkeypatch.setattr(decode, "_MAX_FULL_SIZE_PIXELS", 2**20)
    smooth(1024, 1040).save(tmp_path / "large.jpg", quality=90)
    return str(tmp_path / "large.jpg")


@pytest.fixture
def decoded_sizes(monkeypatch):
    """List to which the size of each image that PIL decodes is appended."""
    sizes, plain = [], decode._pil_pixels
    monkeypatch.setattr(decode, "_pil_pixels", lambda image, *args: sizes.append(image.size) or plain(image, *args))
    return sizes


def test_max_pixels_above_hard_limit_raises():
    assert get_cfg().INPUT.MAX_PIXELS == MAX_PIXELS
    with pytest.raises(ConfigError, match=f"INPUT.MAX_PIXELS.*{LARGEST_PIXELS}"):
        transforms("INPUT.MAX_PIXELS", "200000000")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_image_above_max_pixels_raises_with_path_size_and_key(tmp_path, name, channels):
    smooth(64, 48).save(tmp_path / name)
    path = str(tmp_path / name)
    read = transforms("INPUT.CHANNELS", str(channels), "INPUT.MAX_PIXELS", "3071").read
    with pytest.raises(DataError) as raised:
        read(path)
    text = str(raised.value)
    assert path in text and "48 x 64" in text and "INPUT.MAX_PIXELS 3071" in text
    assert "fix: " in text and "3072" in text
    assert transforms("INPUT.CHANNELS", str(channels), "INPUT.MAX_PIXELS", "3072").read(path).shape[0] == channels


@pytest.mark.parametrize(
    "bytes_before", [b"\xff\x01", b"\xff\xd0", b"\xff\xff\xff", b"\xff\xd7\xff\x01", b"\xff\xfe\x00\x04ab\x00\x12"]
)
def test_jpeg_size_is_found_if_header_has_bytes_between_segments(tmp_path, bytes_before):
    smooth(64, 48).save(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content[:2] + bytes_before + content[2:])
    path = str(tmp_path / "a.jpg")
    assert read_image(path, max_pixels=3072).shape == (3, 64, 48)
    with pytest.raises(DataError, match="48 x 64 .*INPUT.MAX_PIXELS 3071"):
        read_image(path, max_pixels=3071)


def test_max_pixels_applies_to_predictor_and_dataset_check(tmp_path, checkpoint):
    smooth(64, 48).save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.MAX_PIXELS", "3000"])
    with pytest.raises(DataError, match="48 x 64 .*INPUT.MAX_PIXELS 3000"):
        predictor.features(path)
    dataset = ImageDataset([(path, "x_1", 0)], [], [])
    assert any(
        "48 x 64" in text for finding in check_dataset(dataset, max_pixels=3000).findings for text in finding.examples
    )
    assert not any("pixels" in text for finding in check_dataset(dataset).findings for text in finding.examples)


@pytest.mark.parametrize("name", NAMES)
def test_pil_large_image_warning_is_suppressed(tmp_path, monkeypatch, name):
    smooth(64, 48).save(tmp_path / name)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)  # PIL warns above the limit and raises above twice the limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(str(tmp_path / name), channels=4).shape == (4, 64, 48)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=rf"(?s){name} .*{LARGEST_PIXELS}.*fix: "):
        read_image(str(tmp_path / name), channels=4)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_large_jpeg_is_decoded_at_reduced_size(large, decoded_sizes, channels, orientation):
    with Image.open(large) as image:
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(large, quality=90, exif=exif)
    pipeline = transforms("INPUT.CHANNELS", str(channels), "INPUT.SIZE_TEST", "(64, 32)")
    found = pipeline.read(large)
    assert decoded_sizes == [(130, 128)]  # 1/8, at least twice the larger side of the result
    exact = pipeline.resize(read_image(large, channels))
    assert found.shape == exact.shape == (channels, 64, 32)
    difference = (found.int() - exact.int()).abs()
    assert difference.float().mean() < 2 and difference.max() < 16 and not torch.equal(found, exact)


@pytest.mark.parametrize(
    "opts, size",
    [
        (("INPUT.SIZE_TEST", "(128, 75)"), (260, 256)),
        (("INPUT.SIZE_TEST", "(256,)"), (520, 512)),
        (("INPUT.SIZE_TEST", "(257,)"), None),
        (("INPUT.SIZE_TEST", "(0,)"), None),
    ],
)
def test_reduced_size_of_large_jpeg_is_at_least_twice_size_test(large, decoded_sizes, opts, size):
    read = transforms(*opts).read(large)
    assert decoded_sizes == ([] if size is None else [size]) and max(read.shape) >= 128


def test_small_images_and_boxes_are_decoded_at_full_size(tmp_path, large, decoded_sizes):
    pipeline = transforms("INPUT.SIZE_TEST", "(64, 32)")
    smooth(1024, 1024).save(tmp_path / "small.jpg", quality=50)
    path = str(tmp_path / "small.jpg")
    assert torch.equal(pipeline.read(path), pipeline.resize(read_image(path)))
    box = (100, 200, 1000, 800)
    assert torch.equal(pipeline.read(large, box=box), pipeline.resize(read_image(large)[:, 200:800, 100:1000]))
    assert decoded_sizes == []
