"""INPUT.DECODE_REDUCED: JPEG files decoded at reduced scale, by all ways to the features."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import fastamp
from fastamp.config import get_cfg, read_config
from fastamp.data.build import build_reid_test_loader
from fastamp.data.decode import decode_image, read_image
from fastamp.data.transforms import build_transforms
from fastamp.inference.export import export
from fastamp.inference.extract import extract
from fastamp.inference.gallery_source import make_picture
from fastamp.inference.runtime import ExportedModel
from fastamp.serving.decoding import _decode
from fastamp.utils.errors import ConfigError

REDUCED = ("INPUT.DECODE_REDUCED", "True")


def encoded(height, width, *, kind="JPEG", mode="RGB", orientation=1):
    """Encode colors with details of 16 pixels."""
    small = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    exif = image.getexif()
    exif[0x112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, quality=90)
    return file.getvalue()


def transforms(*opts, is_train=False):
    return build_transforms(read_config("", ["INPUT.SIZE_TEST", "(32, 16)", *opts]), is_train=is_train)


def scaled(content, scale):
    """Decode by PIL at 1/scale of the size, and apply the orientation."""
    image = Image.open(io.BytesIO(content))
    image.draft(None, (image.width // scale, image.height // scale))
    return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(2, 0, 1)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "1.jpg").write_bytes(encoded(256, 128))
    return str(tmp_path / "1.jpg")


def test_files_are_decoded_at_the_smallest_scale_with_twice_the_size_of_the_resized_image(subtests):
    turned = {"orientation": 6}
    cases = [
        ((127, 64), {}, (), 1),
        ((128, 63), {}, (), 1),
        ((128, 64), {}, (), 2),
        ((300, 100), {}, (), 2),
        ((256, 128), {}, (), 4),
        ((640, 320), {}, (), 8),
        ((1200, 600), {}, (), 8),
        ((1204, 600), {}, (), 4),
        ((604, 1202), turned, (), 2),
        ((1200, 601), {}, (), 1),
        ((64, 128), turned, (), 2),
        ((64, 128), {}, (), 1),
        ((128, 64), turned, (), 1),
        ((128, 64), {"orientation": 4}, (), 2),
        ((256, 128), {"mode": "L"}, (), 4),
        ((256, 128), {"mode": "CMYK"}, (), 4),
        ((257, 130), {"kind": "PNG"}, (), 1),
        ((257, 130), {"kind": "WEBP"}, (), 1),
        ((128, 130), {}, ("INPUT.SIZE_TEST", "(32,)"), 2),
        ((128, 130), {}, ("INPUT.SIZE_TEST", "(33,)"), 1),
        ((128, 64), {}, ("INPUT.CROP", "True", "INPUT.CROP.SIZE", "(10, 10)"), 2),
        ((512, 256), {}, ("INPUT.SIZE_TEST", "(0,)"), 1),
    ]
    for size, options, opts, scale in cases:
        content = encoded(*size, **options)
        pipeline = transforms(*REDUCED, *opts)
        for channels in (1, 3, 4):
            found = decode_image(content, channels, least_size=pipeline.least_size, **pipeline.decoding)
            full = decode_image(content, channels)
            with subtests.test(size=size, options=options, opts=opts, channels=channels):
                assert found.shape[1:] == tuple(-(-side // scale) for side in full.shape[1:])
                if scale == 1:
                    assert torch.equal(found, full)
                elif channels == 3:
                    assert torch.equal(found, scaled(content, scale))
                    error = (pipeline.resize(found).int() - pipeline.resize(full).int()).abs().float().mean()
                    assert 0 < error < 8


def test_it_is_off_by_default_and_boxes_are_read_at_full_size(path):
    assert get_cfg().INPUT.DECODE_REDUCED is False
    for is_train in (True, False):
        off, on = (transforms("INPUT.SIZE_TRAIN", "(32, 16)", *opts, is_train=is_train) for opts in ((), REDUCED))
        assert torch.equal(off.read(path), off.resize(read_image(path)))
        assert not torch.equal(on.read(path), off.read(path))
        for box in ((0, 0, 128, 256), (5, 3, 101, 250)):
            assert torch.equal(on.read(path, box=box), off.read(path, box=box))
    with pytest.raises(ConfigError, match=r"INPUT\.DECODE_REDUCED"):
        transforms("INPUT.DECODE_REDUCED", "twice")


def test_a_cache_is_not_shared_with_images_at_full_size(tmp_path, path):
    table = tmp_path / "data.csv"
    table.write_text("path,pid,camid,split\n1.jpg,a,1,query\n1.jpg,a,2,gallery\n")
    options = (
        "INPUT.SIZE_TEST",
        "(32, 16)",
        "DATALOADER.NUM_WORKERS",
        "0",
        "DATALOADER.CACHE_DIR",
        str(tmp_path / "c"),
    )
    found = {}
    for cache in ("none", "disk", "disk"):
        for on in ("False", "True"):
            cfg = read_config("", [*options, "INPUT.DECODE_REDUCED", on, "DATALOADER.CACHE", cache])
            images = next(iter(build_reid_test_loader(cfg, f"csv:{table}")[0]))["images"]
            assert torch.equal(images, found.setdefault(on, images))
    assert not torch.equal(found["False"], found["True"])
    assert len([*(tmp_path / "c").rglob("*.*")]) >= 2


def test_features_of_all_ways_follow_the_key_of_the_checkpoint(checkpoint, tmp_path, path):
    content = torch.load(checkpoint, weights_only=True)
    off = fastamp.Predictor(checkpoint, device="cpu")
    content["config"] = off.cfg.with_values({"INPUT.DECODE_REDUCED": True}).dump()
    torch.save(content, tmp_path / "reduced.pth")
    on = fastamp.Predictor(tmp_path / "reduced.pth", device="cpu")
    assert on.config_hash != off.config_hash
    (tmp_path / "files").mkdir()
    file = encoded(256, 128)
    (tmp_path / "files" / "1.jpg").write_bytes(file)
    pixels = {}
    for model, scale in ((off, 1), (on, 2)):
        expected = model.transforms.resize(scaled(file, scale))
        pixels[model] = expected
        features = model.features_of_preprocessed([expected])
        assert torch.equal(model.preprocess(path), expected) and torch.equal(model.preprocess(file), expected)
        assert torch.equal(model.features(path), features)
        assert torch.equal(torch.from_numpy(_decode(model.transforms, False, file, "")[0]), expected)
        found = extract(model, str(tmp_path / "files"), tmp_path / f"{scale}.npz")[0].matrix
        assert np.array_equal(found, features.numpy())
        # Not decoded for the model as a whole: a PIL image, an array, and the frame of boxes.
        whole = off.transforms.resize(decode_image(file))
        assert torch.equal(model.preprocess(Image.open(path)), whole)
        assert torch.equal(model.features(path, boxes=[(0, 0, 128, 256)]), model.features_of_preprocessed([whole]))
    assert not torch.equal(pixels[off], pixels[on])


def test_the_service_stores_pictures_of_full_size():
    for size in ((256, 128), (1024, 512)):
        content = encoded(*size)
        _, picture = _decode(transforms(*REDUCED), True, content, "")
        assert picture == make_picture(decode_image(content))
    _, picture = _decode(transforms(*REDUCED, "INPUT.SIZE_TEST", "(192, 96)"), True, content, "")
    assert Image.open(io.BytesIO(picture)).size == (96, 192)


@pytest.mark.integration
def test_exported_models_follow_the_key(checkpoint, tmp_path, path):
    pytest.importorskip("onnxruntime")
    for on in ("False", "True"):
        predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["INPUT.DECODE_REDUCED", on])
        export(predictor, tmp_path / f"{on}.onnx", data="")
        exported = ExportedModel(tmp_path / f"{on}.onnx")
        assert exported.config_hash == predictor.config_hash
        assert torch.equal(exported.preprocess(path), predictor.preprocess(path))
