"""Gray images of more than 8 bits: INPUT.BIT_DEPTH in every reader."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import fastamp
from fastamp.config import get_cfg
from fastamp.data import decode
from fastamp.data.datasets.items import ImageItem
from fastamp.data.decode import decode_image, image_from_pil, read_image
from fastamp.data.image_summary import inspect_image
from fastamp.data.transforms import build_transforms
from fastamp.inference.export import export
from fastamp.inference.runtime import ExportedModel
from fastamp.tracking.frames import Frames
from fastamp.utils.errors import ConfigError, DataError

EIGHT = np.random.default_rng(0).integers(0, 256, (64, 32)).astype(np.uint8)
EIGHT[0, :2] = 0, 255


def write(path, bits, dtype):
    Image.fromarray((EIGHT.astype(np.int64) << (bits - 8)).astype(dtype)).save(path)
    return str(path)


@pytest.fixture(autouse=True)
def warned():
    decode._warned_of_bits.clear()


@pytest.mark.parametrize(
    "name, bits, dtype",
    [
        ("x.png", 16, np.uint16),
        ("x.png", 12, np.uint16),
        ("x.tif", 14, np.uint16),
        ("x.tif", 8, np.int32),
        ("x.tif", 20, np.int32),
        ("x.tif", 31, np.int32),
    ],
)
def test_values_are_scaled_by_the_bit_depth(tmp_path, name, bits, dtype, caplog):
    path = write(tmp_path / name, bits, dtype)
    expected = torch.from_numpy(EIGHT).expand(3, -1, -1)
    assert torch.equal(read_image(path, bit_depth=bits), expected)
    assert torch.equal(decode_image((tmp_path / name).read_bytes(), bit_depth=bits), expected)
    assert torch.equal(image_from_pil(Image.open(path), bit_depth=bits), expected)
    assert torch.equal(read_image(path, bit_depth=None), expected)
    cfg = get_cfg().with_values({"INPUT.BIT_DEPTH": bits, "INPUT.SIZE_TEST": (64, 32)})
    assert torch.equal(build_transforms(cfg, is_train=False).read(path), expected)
    assert not inspect_image(ImageItem(path, 0, 0), bit_depth=bits).fault
    assert not caplog.text


@pytest.mark.parametrize("bits, dtype, fix", [(12, np.uint16, 12), (14, np.uint16, 14), (8, np.int32, 8)])
def test_values_in_a_small_part_of_the_range_log_one_warning(tmp_path, bits, dtype, fix, caplog):
    paths = [write(tmp_path / f"{number}.tif", bits, dtype) for number in range(2)]
    for path in paths:
        read_image(path)
    (message,) = caplog.messages
    assert paths[0] in message and f"INPUT.BIT_DEPTH to {fix}" in message
    decode._warned_of_bits.clear()
    inspect_image(ImageItem(paths[1], 0, 0))
    assert paths[1] in caplog.messages[-1]


@pytest.mark.parametrize("values, bit_depth", [([-1, 5], 16), ([0, 65536], 16), ([0, 4096], 12), ([0, 256], 8)])
def test_impossible_values_are_an_error(tmp_path, values, bit_depth):
    path = str(tmp_path / "x.tif")
    Image.fromarray(np.array([values], dtype=np.int32)).save(path)
    with pytest.raises(DataError, match=f"x.tif.* {values[0]} to {values[1]}.*BIT_DEPTH"):
        read_image(path, bit_depth=bit_depth)
    with pytest.raises(DataError, match="BIT_DEPTH"):
        image_from_pil(Image.open(path), bit_depth=bit_depth)
    assert "BIT_DEPTH" in inspect_image(ImageItem(path, 0, 0), bit_depth=bit_depth).fault


@pytest.mark.integration
def test_the_bit_depth_is_part_of_the_features(checkpoint, tmp_path):
    path = write(tmp_path / "1.png", 12, np.uint16)
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.BIT_DEPTH", "12"])
    default = fastamp.Predictor(checkpoint, device="cpu")
    assert predictor.config_hash != default.config_hash
    expected = default.features(EIGHT)
    assert torch.equal(predictor.features(path), expected)
    assert torch.equal(predictor.features(Image.open(path)), expected)
    with pytest.raises(ConfigError, match="INPUT.BIT_DEPTH"):
        fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.BIT_DEPTH", "7"])
    frames = Frames(tmp_path, bit_depth=predictor.transforms.bit_depth)
    np.testing.assert_array_equal(next(frames.read())[1][..., 0], EIGHT)
    pytest.importorskip("onnxruntime")
    export(predictor, tmp_path / "model.onnx", data="")
    exported = ExportedModel(tmp_path / "model.onnx")
    assert exported.transforms.bit_depth == 12 and torch.equal(exported.features(path), exported.features(EIGHT))


def png_of_colors(values):
    """Encode (H, W, 3) uint16 colors as a PNG file, which PIL cannot write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width = values.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_colors_of_16_bits_are_read_with_their_upper_8_bits(caplog):
    colors = np.stack([EIGHT, EIGHT[::-1], EIGHT[:, ::-1]], axis=2).astype(np.uint16)
    expected = torch.from_numpy(colors.astype(np.uint8)).permute(2, 0, 1)
    assert torch.equal(decode_image(png_of_colors(colors << 8)), expected) and not caplog.text
    assert torch.equal(decode_image(png_of_colors(colors << 4)), expected >> 4)
    assert "8 bits" in caplog.messages[0]
    with pytest.raises(DataError, match="16 bits.*BIT_DEPTH is 12"):
        decode_image(png_of_colors(colors << 4), bit_depth=12)
