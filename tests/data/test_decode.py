import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.data.decode import read_image
from fastamp.utils.errors import DataError


def pil_rgb(path):
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.webp", "name with space é 人.png"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_lossless_images_are_what_pil_reads(tmp_path, write_image, name, mode):
    options = {"lossless": True} if name.endswith("webp") else {}
    path = write_image(tmp_path / name, mode=mode, **options)
    image = read_image(str(path))
    assert image.shape == (3, 64, 32) and image.dtype == torch.uint8
    assert torch.equal(image, pil_rgb(path))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_are_what_pil_reads(tmp_path, write_image, mode):
    path = write_image(tmp_path / "a.jpg", mode=mode, quality=95)
    image = read_image(str(path))
    assert image.shape == (3, 64, 32)
    assert (image.int() - pil_rgb(path).int()).abs().max() <= (3 if mode == "CMYK" else 0)


def test_pil_alone_reads_the_same(tmp_path, write_image, monkeypatch):
    path = str(write_image(tmp_path / "a.jpg"))
    image = read_image(path)
    monkeypatch.setattr("fastamp.data.decode.torchvision_decode", None)
    assert torch.equal(read_image(path), image)


def test_grey_becomes_three_equal_channels(tmp_path, write_image):
    image = read_image(str(write_image(tmp_path / "a.jpg", mode="L")))
    assert torch.equal(image[0], image[1]) and torch.equal(image[1], image[2])


def test_transparency_is_dropped(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert torch.equal(read_image(str(tmp_path / "a.png")), torch.from_numpy(pixels[..., :3].copy()).permute(2, 0, 1))


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path, name):
    pixels = np.random.default_rng(0).integers(0, 2**16, (8, 6), dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / name)
    expected = torch.from_numpy((pixels >> 8).astype(np.int64)).expand(3, 8, 6)
    # torchvision scales by 255 / 65535, which differs by one at most.
    assert (read_image(str(tmp_path / name)).long() - expected).abs().max() <= 1


@pytest.mark.parametrize("name", ["a.jpg", "a.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_come_upright(tmp_path, name, orientation):
    ramp = np.linspace(0, 255, 48, dtype=np.uint8)[:, None] * np.linspace(0, 1, 32)[None]
    image = Image.fromarray(np.stack([ramp] * 3, axis=2).astype(np.uint8))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / name, exif=exif, **({"quality": 95} if name == "a.jpg" else {}))
    turned = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    upright = image if orientation == 1 else image.transpose(turned[orientation])
    expected = torch.from_numpy(np.asarray(upright).copy()).permute(2, 0, 1)
    assert (read_image(str(tmp_path / name)).int() - expected.int()).abs().max() <= 4


def test_of_an_animation_the_first_picture_is_taken(tmp_path):
    frames = [Image.new("P", (6, 8), colour) for colour in (3, 5)]
    for frame in frames:
        frame.putpalette(list(range(256)) * 3)
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert torch.equal(read_image(str(tmp_path / "a.gif")), pil_rgb(tmp_path / "a.gif"))


def spoil(path, kind):
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "text": b"not an image", "half": data[: len(data) // 2]}[kind])


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "half"])
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp"])
def test_a_bad_file_is_named_on_one_line(tmp_path, write_image, name, kind):
    path = write_image(tmp_path / name)
    spoil(path, kind)
    with pytest.raises(DataError) as raised:
        read_image(str(path))
    assert str(path) in str(raised.value) and len(str(raised.value).splitlines()) == 1
