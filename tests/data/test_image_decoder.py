import importlib.metadata
import io
import struct

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from fastamp.config import get_cfg
from fastamp.data import image_decoder as module
from fastamp.data.decode import decode_image, read_image
from fastamp.data.image_decoder import KEYS, image_decoder
from fastamp.data.transforms import build_transforms
from fastamp.utils.errors import ConfigError, DataError

DECODERS = KEYS[0].choices[1:]
LEFT_BOTTOM = 8  # an EXIF orientation that exchanges height and width


@pytest.fixture(autouse=True)
def fresh():
    image_decoder.cache_clear()
    yield
    image_decoder.cache_clear()


@pytest.fixture(params=[pytest.param("torchcodec", marks=pytest.mark.extras), "torchvision", "pil"])
def name(request):
    """Name of a decoder; the extra ``test`` does not install torchcodec."""
    pytest.importorskip({"pil": "PIL"}.get(request.param, request.param))
    return request.param


def encoded(kind="JPEG", *, mode="RGB", size=(37, 61), orientation=1, **options):
    """Encode random smooth colors."""
    small = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).convert(mode)
    exif = image.getexif()
    if orientation != 1:
        exif[0x112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, **options)
    return file.getvalue()


def test_decoded_pixels_equal_those_of_pil(name, subtests):
    cases = [
        *({"subsampling": sampling, "quality": quality} for sampling in (0, 1, 2) for quality in (50, 95)),
        {"progressive": True},
        {"mode": "L"},
        {"mode": "CMYK"},
        {"size": (1, 1)},
        {"size": (1920, 1080), "orientation": LEFT_BOTTOM},
        *({"kind": kind, "orientation": LEFT_BOTTOM} for kind in ("PNG", "WEBP")),
        {"kind": "PNG", "mode": "RGBA"},
    ]
    for case in cases:
        content = encoded(**case)
        for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
            image = decode_image(content, channels, decoder=name)
            opened = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert(mode)
            expected = torch.from_numpy(np.atleast_3d(np.array(opened))).permute(2, 0, 1)
            with subtests.test(case=case, channels=channels):
                assert torch.equal(image, expected)


def app1(content):
    return b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content


def exif(orientation, *, kind=3, order=">"):
    """Encode an orientation as a tag of ``kind`` 3 (16 bits) or 4 (32 bits)."""
    value = struct.pack(f"{order}{'HH' if kind == 3 else 'I'}", *(orientation, 0)[: 5 - kind])
    tag = struct.pack(f"{order}HHI", 0x112, kind, 1) + value
    start = {">": b"MM", "<": b"II"}[order] + struct.pack(f"{order}HIH", 42, 8, 1)
    return app1(b"Exif\0\0" + start + tag + bytes(4))


def test_all_decoders_find_the_orientation_that_pil_finds(name, subtests):
    plain = encoded()
    xmp = app1(b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="6"/>')
    cases = {
        **{f"EXIF {number}{order}": exif(number, order=order) for number in range(10) for order in "<>"},
        **{f"32 bits {order}": exif(6, kind=4, order=order) for order in "<>"},
        "XMP": xmp,
        "EXIF before XMP": exif(3) + xmp,
        "EXIF after XMP": xmp + exif(3),
        "EXIF twice": exif(3) + exif(6),
    }
    shapes = set()
    for case, segments in cases.items():
        content = plain[:2] + segments + plain[2:]
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
        shapes.add(expected.shape)
        with subtests.test(case=case):
            assert np.array_equal(decode_image(content, decoder=name).permute(1, 2, 0), expected)
    assert len(shapes) == 2


def test_damaged_files_raise_data_errors(name, tmp_path):
    content = encoded(size=(200, 100))
    for number, damaged in enumerate((content[:2], content[:100], content[:200] + b"\xff\xd9", b"\xff\xd8" * 50)):
        (tmp_path / f"{number}.jpg").write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{number}\.jpg"):
            read_image(str(tmp_path / f"{number}.jpg"), decoder=name)


def missing():
    raise ImportError("built for another PyTorch")


def test_loaders_read_with_the_decoder_of_the_config(name, tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(encoded())
    cfg = get_cfg()
    cfg.merge_from_list(["INPUT.DECODER", name])
    transforms = build_transforms(cfg, is_train=False)
    assert transforms.decoder == name
    expected = transforms.read(str(tmp_path / "a.jpg"))
    image_decoder.cache_clear()
    others = {other: ("torch", missing) for other in DECODERS if other != name}
    monkeypatch.setattr(module, "_LOADERS", module._LOADERS | others)
    assert torch.equal(transforms.read(str(tmp_path / "a.jpg")), expected)


def test_auto_selects_the_first_decoder_that_works(monkeypatch, caplog):
    for name in DECODERS:
        monkeypatch.setitem(module._LOADERS, name, ("torch", lambda: None))
    assert image_decoder().name == DECODERS[0]
    for number, name in enumerate(DECODERS[:-1]):
        image_decoder.cache_clear()
        monkeypatch.setitem(module._LOADERS, name, ("no-such-package", missing))
        assert image_decoder().name == DECODERS[number + 1]
    assert not caplog.messages
    image_decoder.cache_clear()
    monkeypatch.setitem(module._LOADERS, DECODERS[0], ("torch", missing))
    assert image_decoder().name == DECODERS[-1]
    (message,) = caplog.messages
    assert "ImportError" in message and "fix: " in message


def test_a_decoder_that_is_named_must_work(monkeypatch):
    for package in ("no-such-package", "torch"):
        image_decoder.cache_clear()
        monkeypatch.setattr(module, "_LOADERS", module._LOADERS | {"torchcodec": (package, missing)})
        cfg = get_cfg()
        cfg.merge_from_list(["INPUT.DECODER", "torchcodec"])
        with pytest.raises(ConfigError, match=r"INPUT\.DECODER(.|\n)*fix:"):
            build_transforms(cfg)


@pytest.mark.parametrize("name, package", [("torchvision", "torchvision"), ("pil", "pillow")])
def test_name_and_version(name, package):
    assert str(image_decoder(name)) == f"{name} {importlib.metadata.version(package)}"
