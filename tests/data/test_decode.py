import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastamp.data.datasets.items import ImageItem
from fastamp.data.decode import image_from_pil, read_image
from fastamp.data.image_summary import inspect_image
from fastamp.utils.errors import DataError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
every_channels = pytest.mark.parametrize("channels", MODES)


def as_tensor(image, channels=3):
    """Convert an image to (C, H, W) with PIL."""
    pixels = torch.from_numpy(np.array(image.convert(MODES[channels])))
    return pixels.view(image.height, image.width, channels).permute(2, 0, 1)


def pil(path, channels=3):
    with Image.open(path) as image:
        return as_tensor(image, channels)


def test_decoded_lossless_images_equal_pil(tmp_path, write_image, subtests):
    for mode in ("RGB", "L", "P"):
        for name in ("a.png", "a.bmp", "a.tif", "a.webp", "name with space é 人.png"):
            for channels in MODES:
                with subtests.test(f"{mode} {name} {channels}"):
                    options = {"lossless": True} if name.endswith("webp") else {}
                    path = write_image(tmp_path / name, mode=mode, **options)
                    image = read_image(str(path), channels)
                    assert image.shape == (channels, 64, 32) and image.dtype == torch.uint8
                    assert torch.equal(image, pil(path, channels))


def test_decoded_jpeg_images_equal_pil(tmp_path, write_image, subtests):
    for mode in ("RGB", "L", "CMYK"):
        for channels in MODES:
            with subtests.test(f"{mode} {channels}"):
                path = write_image(tmp_path / "a.jpg", mode=mode, quality=95)
                image = read_image(str(path), channels)
                assert image.shape == (channels, 64, 32)
                assert torch.equal(image, pil(path, channels))


def test_image_from_pil_equals_read_image(tmp_path, subtests):
    cases = [("1", "a.png"), ("L", "a.png"), ("LA", "a.png"), ("P", "a.png"), ("PA", "a.png"), ("RGBA", "a.png"),
             ("I;16", "a.png"), ("CMYK", "a.tif"), ("YCbCr", "a.tif"), ("RGB", "a.jpg"), ("L", "a.jpg"),
             ("CMYK", "a.jpg")]  # fmt: skip
    for mode, name in cases:
        for channels in MODES:
            with subtests.test(f"{mode} {name} {channels}"):
                pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 4), dtype=np.uint8)
                if mode == "I;16":
                    image = Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
                elif mode == "PA":
                    image = Image.fromarray(pixels).quantize(16)  # a palette with transparency
                else:
                    image = Image.fromarray(pixels if mode in ("LA", "RGBA") else pixels[:, :, :3]).convert(mode)
                image.save(tmp_path / name)
                expected = read_image(str(tmp_path / name), channels)
                with Image.open(tmp_path / name) as opened:
                    found = image_from_pil(opened, channels)
                assert found.shape == (channels, 24, 40) and found.dtype == torch.uint8
                assert torch.equal(found, expected)


@every_channels
def test_png_gamma_is_ignored(tmp_path, write_image, channels):
    """For such files, libpng would compute gray values in linear light, which differ by up to 60."""
    with Image.open(write_image(tmp_path / "plain.png")) as image:
        text = PngInfo()
        text.add(b"gAMA", (45455).to_bytes(4, "big"))
        image.save(tmp_path / "gamma.png", pnginfo=text)
    assert torch.equal(
        read_image(str(tmp_path / "gamma.png"), channels), read_image(str(tmp_path / "plain.png"), channels)
    )


def test_gray_pixel_values_are_unchanged_in_grayscale_images(tmp_path):
    grays = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    for name, mode in (("gray.png", "L"), ("color.png", "RGB")):
        Image.fromarray(grays[0].numpy()).convert(mode).save(tmp_path / name)
        assert torch.equal(read_image(str(tmp_path / name), channels=1), grays)


def test_grayscale_file_is_read_as_three_equal_channels(tmp_path, write_image):
    image = read_image(str(write_image(tmp_path / "a.jpg", mode="L")))
    assert torch.equal(image[0], image[1]) and torch.equal(image[1], image[2])


def test_alpha_is_dropped_if_channels_is_1_or_3(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    colors = torch.from_numpy(pixels[..., :3].copy()).permute(2, 0, 1)
    assert torch.equal(read_image(str(tmp_path / "a.png")), colors)
    assert torch.equal(
        read_image(str(tmp_path / "a.png"), channels=1), as_tensor(Image.fromarray(pixels[..., :3]), channels=1)
    )


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.webp"])
def test_alpha_is_kept_if_channels_is_4(tmp_path, name):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 4), dtype=np.uint8)
    options = {"lossless": True, "exact": True} if name.endswith("webp") else {}
    Image.fromarray(pixels).save(tmp_path / name, **options)
    image = read_image(str(tmp_path / name), channels=4)
    assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))


def test_missing_alpha_channel_is_filled_with_255(tmp_path, write_image, subtests):
    for mode in ("1", "L", "P", "RGB", "CMYK"):
        with subtests.test(mode):
            path = write_image(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), mode=mode)
            image = read_image(str(path), channels=4)
            assert torch.equal(image[:3], read_image(str(path))) and (image[3] == 255).all()


@pytest.mark.parametrize(("mode", "color"), [("L", 5), ("P", 5), ("RGB", (5, 6, 7))])
def test_png_pixels_with_the_transparent_color_have_alpha_0(tmp_path, write_image, mode, color):
    path = write_image(tmp_path / "a.png", mode=mode)
    with Image.open(path) as image:
        image.putpixel((3, 2), color)
        image.save(path, transparency=color)
    image = read_image(str(path), channels=4)
    assert torch.equal(image, pil(path, channels=4))
    assert image[3, 2, 3] == 0 and image[3].float().mean() > 200


def test_palettes_with_several_alpha_values_cause_no_warning(tmp_path, recwarn):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).quantize(16).save(tmp_path / "a.png", transparency=bytes(range(16)))
    read = {channels: read_image(str(tmp_path / "a.png"), channels) for channels in MODES}
    assert not inspect_image(ImageItem(str(tmp_path / "a.png"), 0, 0)).fault
    assert not recwarn.list
    assert all(torch.equal(image, pil(tmp_path / "a.png", channels)) for channels, image in read.items())


def test_images_with_16_bit_channels_keep_the_upper_8_bits(tmp_path, subtests):
    for name in ("a.png", "a.tif"):
        for channels in MODES:
            with subtests.test(f"{name} {channels}"):
                pixels = np.random.default_rng(0).integers(0, 2**16, (8, 6), dtype=np.uint16)
                Image.fromarray(pixels).save(tmp_path / name)
                expected = as_tensor(Image.fromarray((pixels >> 8).astype(np.uint8)), channels).int()
                # torchvision scales by 255 / 65535, which differs by one at most.
                assert (read_image(str(tmp_path / name), channels).int() - expected).abs().max() <= 1


TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def test_exif_orientation_is_applied(tmp_path, subtests):
    for orientation in range(1, 9):
        for name in ("a.jpg", "a.tif"):
            for channels in MODES:
                with subtests.test(f"{orientation} {name} {channels}"):
                    ramp = np.linspace(0, 255, 48, dtype=np.uint8)[:, None] * np.linspace(0, 1, 32)[None]
                    image = Image.fromarray(np.stack([ramp] * 3, axis=2).astype(np.uint8))
                    exif = image.getexif()
                    exif[0x0112] = orientation
                    image.save(tmp_path / name, exif=exif, **({"quality": 95} if name == "a.jpg" else {}))
                    upright = image if orientation == 1 else image.transpose(TRANSPOSES[orientation])
                    expected = as_tensor(upright, channels).int()
                    assert (read_image(str(tmp_path / name), channels).int() - expected).abs().max() <= 4


@every_channels
def test_first_frame_of_an_animation_is_read(tmp_path, channels):
    frames = [Image.new("P", (6, 8), color) for color in (3, 5)]
    for frame in frames:
        frame.putpalette(list(range(256)) * 3)
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert torch.equal(read_image(str(tmp_path / "a.gif"), channels), pil(tmp_path / "a.gif", channels))


def corrupt(path, kind):
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "text": b"not an image", "half": data[: len(data) // 2]}[kind])


def test_unreadable_file_error_is_one_line_with_path(tmp_path, write_image, subtests):
    for name in ("a.jpg", "a.png", "a.bmp"):
        for kind in ("missing", "folder", "empty", "text", "half"):
            for channels in MODES:
                with subtests.test(f"{name} {kind} {channels}"):
                    path = write_image(tmp_path / f"{kind} {channels}" / name)
                    corrupt(path, kind)
                    with pytest.raises(DataError) as raised:
                        read_image(str(path), channels)
                    assert str(path) in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_error_of_a_file_that_is_no_image_names_no_object_in_memory(tmp_path):
    (tmp_path / "text.png").write_bytes(b"not an image")
    with pytest.raises(DataError) as error:
        read_image(tmp_path / "text.png")
    assert "text.png" in str(error.value) and " at 0x" not in str(error.value)
