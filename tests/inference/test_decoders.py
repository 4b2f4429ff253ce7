"""Features of files with each decoder, by all ways to them."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp import Predictor
from fastamp.cli.source import evaluation_config
from fastamp.data import decode
from fastamp.data import image_decoder as module
from fastamp.data.image_decoder import KEYS, image_decoder
from fastamp.inference.extract import extract
from fastamp.serving.decoding import _decode
from fastamp.tracking.frames import Frames
from fastamp.utils.errors import ConfigError


def encoded(mode="RGB", *, kind="JPEG", quality=90, **options):
    small = np.random.default_rng(0).integers(0, 256, (16, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(small).resize((48, 96), Image.Resampling.BICUBIC).convert(mode)
    exif = image.getexif()
    exif[0x112] = 3
    image.save(file, kind, quality=quality, exif=exif, **options)
    return file.getvalue()


def features(checkpoint, folder, name, out, used, monkeypatch):
    """Return the features (W, N, D) of the files of a folder by W ways, with one decoder."""
    with monkeypatch.context() as patch:
        patch.setattr(decode, "image_decoder", lambda name: used.append(name) or image_decoder(name))
        model = Predictor(checkpoint, device="cpu", opts=["INPUT.DECODER", name])
        paths = sorted(str(path) for path in folder.iterdir())
        contents = [(folder / path).read_bytes() for path in paths]
        upload = partial(_decode, model.transforms, False)
        frames = Frames(folder, bit_depth=model.transforms.bit_depth, decoder=model.transforms.decoder)
        ways = (
            model.features(paths),
            model.features(contents),
            model.features(
                [upload(content, path)[0].transpose(1, 2, 0) for content, path in zip(contents, paths, strict=True)]
            ),
            model.features([frame for _, frame in frames.read()]),
            extract(model, str(folder), out / f"{folder.name}-{name}.npz")[0].matrix,
        )
    return np.stack([np.asarray(way) for way in ways])


def test_a_checkpoint_is_used_without_the_decoder_of_its_training(checkpoint, tmp_path, monkeypatch):
    image_decoder.cache_clear()
    monkeypatch.setitem(module._LOADERS, "torchcodec", ("no-such-package", None))
    content = torch.load(checkpoint, weights_only=True)
    cfg = Predictor(checkpoint, device="cpu").cfg
    content["config"] = cfg.with_values({"INPUT.DECODER": "torchcodec"}).dump()
    torch.save(content, tmp_path / "other.pth")
    assert Predictor(tmp_path / "other.pth", device="cpu").transforms.decoder != "torchcodec"
    assert evaluation_config("", [], source=str(tmp_path / "other.pth"))[0].INPUT.DECODER == "auto"
    with pytest.raises(ConfigError, match=r"INPUT\.DECODER"):
        Predictor(tmp_path / "other.pth", device="cpu", opts=["INPUT.DECODER", "torchcodec"])
    image_decoder.cache_clear()


def test_features_do_not_depend_on_the_decoder(checkpoint, tmp_path, monkeypatch):
    cases = ({}, {"subsampling": 0}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}, {"kind": "WEBP"})
    folders = [tmp_path / "files", tmp_path / "worse"]
    for folder, quality in zip(folders, (90, 30), strict=True):
        folder.mkdir()
        for number, case in enumerate(cases, start=1):
            suffix = case.get("kind", "jpg").lower()
            (folder / f"{number}.{suffix}").write_bytes(encoded(**case, quality=quality))
    found = {}
    for name in KEYS[0].choices[1:]:
        try:
            image_decoder(name)
        except ConfigError:  # the extra ``test`` does not install torchcodec
            continue
        used = []
        found[name] = features(checkpoint, folders[0], name, tmp_path, used, monkeypatch)
        assert set(used) == {name} and len(used) >= len(found[name]) * (len(cases) - 1)
    assert len(found) > 1
    expected = found["pil"][0]

    def difference(values):
        return (np.linalg.norm(values - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max()

    for name, values in found.items():
        assert difference(values) < 1e-3, name
    assert difference(features(checkpoint, folders[1], "pil", tmp_path, [], monkeypatch)) > 1e-3
