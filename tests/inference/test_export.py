"""Tests of export: parity with the PyTorch model, metadata, and failed parity checks."""

import argparse
import errno
import hashlib
import json
import logging
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torch import nn
from video_set import write_video

import fastamp
from fastamp.cli import export as command
from fastamp.config import get_cfg
from fastamp.data import build_reid_test_loader
from fastamp.data.decode import read_image
from fastamp.engine import run_command_line
from fastamp.inference.export import FORMATS, ExportError, check, export, onnx_format, openvino_format
from fastamp.inference.export.formats import Format
from fastamp.inference.export.quiet import quiet
from fastamp.inference.parity import RankedImages
from fastamp.modeling import BACKBONE_REGISTRY, build_model
from fastamp.modeling.backbones import vit
from fastamp.utils.errors import ConfigError, DataError, WriteError

GUIDE = Path(__file__).parents[2] / "docs/guides/export.md"
needs_onnx = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="ONNX export needs PyTorch 2.7"
)
ONNX = pytest.param(".onnx", marks=needs_onnx)


def run(*arguments):
    """Run ``fastamp export`` and return its exit code."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return run_command_line(lambda: command.run(parser.parse_args([str(argument) for argument in arguments])))


def first_batch(predictor):
    """Load the first test batch of the demo dataset."""
    return next(iter(build_reid_test_loader(predictor.cfg, "Demo")[0]))


@pytest.fixture
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@BACKBONE_REGISTRY.register()
def build_asking_backbone(cfg):
    """Build a backbone with data-dependent control flow, which cannot be traced."""

    class Asking(nn.Conv2d):
        def forward(self, x):
            return super().forward(-x if x.sum() > 0 else x)

    return Asking(3, tiny.WIDTH, 8, 8)


def untrained(path, *opts):
    """Save a model with random weights, and return a predictor that loads it."""
    cfg = get_cfg()
    small = ("MODEL.BACKBONE.FEAT_DIM", str(tiny.WIDTH), "INPUT.SIZE_TEST", "(64, 32)")
    cfg.merge_from_list(
        ["MODEL.DEVICE", "cpu", "MODEL.HEADS.WITH_BNNECK", "True", "DATASETS.TESTS", "()", *small, *opts]
    )
    torch.save({"model": build_model(cfg).state_dict(), "config": cfg.dump()}, path)
    return fastamp.Predictor(path, device="cpu")


def loaded(path):
    """Load an exported file; return a function from inputs to features, and the metadata."""
    if path.suffix == ".onnx":
        import onnxruntime

        metadata = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
        texts = (
            "fastamp_version",
            "config_hash",
            "color_order",
            "normalization",
            "metric",
            "precision",
        )
        texts += ("aspect", "interpolation", "license", "model_hash", "preprocess", "protocol")
        metadata = {key: value if key in texts else json.loads(value) for key, value in metadata.items()}
    else:
        files = {"metadata.json": ""}
        torch.export.load(path, extra_files=files)
        metadata = json.loads(files["metadata.json"])
    return FORMATS[path.suffix].runner({path.suffix: path.read_bytes()}), metadata


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [ONNX, ".pt2"])
def test_inference_code_in_export_guide_reproduces_predictor_features(
    demo, checkpoint, predictor, suffix, tmp_path, capfd, monkeypatch
):
    path = tmp_path / f"model{suffix}"
    assert run(checkpoint, path, "--device", "cpu") == 0
    out, err = capfd.readouterr()
    assert (
        re.search(r"mAP: ([\d.]+) in PyTorch \(float32\), \1 exported \(float32\), difference [+-]0.00", out)
        and "Demo, 30 images" in out
    )
    assert all(f"random, batch of {size} " in out for size in (1, 3, 32)) and "[torch.onnx]" not in out + err
    assert err == ""
    assert str(Path(fastamp.__file__).parent).encode() not in path.read_bytes()  # no local paths in the file
    _, metadata = loaded(path)
    assert metadata == {
        "fastamp_version": fastamp.__version__,
        "config_hash": predictor.config_hash,
        "model_hash": hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest(),
        "license": "unknown",
        "preprocess": "outside",
        "protocol": predictor.cfg.TEST.PROTOCOL,
        "input_size": [64, 32],
        "resize": [64, 32],
        "aspect": "stretched",
        "interpolation": "bicubic",
        "antialias": True,
        "center_crop": None,
        "channels": 3,
        "bit_depth": 16,
        "decode_reduced": False,
        "color_order": "RGB",
        "normalization": "inside",
        "pixel_mean": predictor.model.pixel_mean.flatten().tolist(),
        "pixel_std": predictor.model.pixel_std.flatten().tolist(),
        "l2": False,
        "flip": False,
        "metric": "cosine",
        "precision": "float32",
        "feature_width": 16,
    }
    batch = first_batch(predictor)
    Image.open(batch["img_paths"][0]).resize((57, 101)).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    onnx_code, pt2_code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"images": predictor.preprocess("image.jpg")[None].float().numpy()}
    exec(onnx_code if suffix == ".onnx" else pt2_code, names)
    difference = names["images"] - predictor.preprocess("image.jpg")[None].numpy()
    assert np.abs(difference).max() <= 2 and np.abs(difference).mean() < 0.1
    features = torch.as_tensor(names["features"]).detach()
    expected = predictor.features("image.jpg")
    torch.testing.assert_close(features, expected, rtol=0, atol=0.01 * expected.abs().max().item())
    assert read_image("image.jpg").shape[1:] != (64, 32)  # preprocessing resized it


@pytest.mark.integration
@pytest.mark.parametrize("suffix", [ONNX, ".pt2"])
def test_fp16_export_with_external_normalization_returns_unit_features(demo, checkpoint, suffix, tmp_path):
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["TEST.FLIP.ENABLED", "True"])
    path = tmp_path / f"model{suffix}"
    report = export(predictor, path, precision="fp16", normalization=False, l2=True, tolerance=5)  # 8 queries only
    assert 0 < max(comparison.difference for comparison in report.comparisons) < 1e-2
    model, metadata = loaded(path)
    assert metadata["l2"] and metadata["flip"] and metadata["normalization"] == "outside"
    batch = first_batch(predictor)
    mean, std = (torch.tensor(metadata[name])[:, None, None] for name in ("pixel_mean", "pixel_std"))
    images = (batch["images"] - mean) / std
    found = model({"images": images})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(images)), rtol=0, atol=1e-6)
    expected = torch.nn.functional.normalize(predictor.features(batch["img_paths"]), dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def files_at(path):
    """Read an exported file, and the file of its weights."""
    return {
        suffix: path.with_suffix(suffix).read_bytes()
        for suffix in (path.suffix, ".bin")
        if path.with_suffix(suffix).exists()
    }


def openvino_metadata(path):
    import openvino

    entries = openvino.Core().read_model(path).get_rt_info()["fastamp"]
    texts = {key: value.astype(str) for key, value in entries.items()}
    return texts | {"input_size": json.loads(texts["input_size"]), "pixel_mean": json.loads(texts["pixel_mean"])}


def torchscript_metadata(path):
    files = {"metadata.json": ""}
    torch.jit.load(path, _extra_files=files)
    return json.loads(files["metadata.json"])


@pytest.mark.parametrize(
    "name, suffix, read_metadata",
    [
        pytest.param("openvino", ".xml", openvino_metadata, marks=pytest.mark.extras),
        ("torchscript", ".ts", torchscript_metadata),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_openvino_and_torchscript_files_reproduce_features_and_carry_metadata(
    demo, checkpoint, predictor, tmp_path, capfd, name, suffix, read_metadata, precision
):
    arguments = (checkpoint, tmp_path / "model", "--format", name, "--precision", precision, "--tolerance", "5")
    assert run(*arguments, "--device", "cpu") == 0
    assert "Demo, 30 images" in capfd.readouterr().out
    path = tmp_path / f"model{suffix}"
    files, metadata = files_at(path), read_metadata(path)
    assert not any(str(Path(fastamp.__file__).parent).encode() in content for content in files.values())
    assert metadata["config_hash"] == predictor.config_hash and metadata["precision"] == precision
    assert metadata["input_size"] == [64, 32] and len(metadata["pixel_mean"]) == 3
    batch = first_batch(predictor)
    expected = predictor.features(batch["img_paths"])
    bound = (1e-4 if precision == "float32" else 0.02) * expected.abs().max().item()
    model = FORMATS[suffix].runner(files)
    for count in (1, 5):
        found = model({"images": batch["images"][:count].float()})
        torch.testing.assert_close(found, expected[:count], rtol=0, atol=bound)


def test_warnings_of_exporters_do_not_configure_logging(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    with quiet("the exporter fails"):
        logging.warning("a message")
    assert logging.root.handlers == []


@pytest.mark.extras
def test_openvino_files_are_both_kept_if_one_cannot_be_written(predictor, tmp_path, monkeypatch):
    path = tmp_path / "model.xml"
    for suffix in (".xml", ".bin"):
        path.with_suffix(suffix).write_text("the last one")
    original, written = os.fsync, []

    def fail(handle):
        written.append(handle)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(handle)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WriteError, match="No space"):
        export(predictor, path, data="")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys(
        ("model.xml", "model.bin"), "the last one"
    )


@pytest.mark.parametrize("before, after", [((4, 2), (4, 2)), ((8, 8), (4, 2)), ((7, 5), (14, 11)), ((14, 14), (5, 20))])
def test_resizing_in_openvino_files_equals_that_of_pytorch(before, after):
    maps = torch.randn(1, 3, *before, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(maps, after, mode="bicubic", antialias=True)
    torch.testing.assert_close(openvino_format._resized(maps, after, False), expected, rtol=0, atol=1e-5)


def test_format_and_suffix_must_agree(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "model.onnx", "--format", "torchscript", "--device", "cpu") == 2
    assert "--format torchscript" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.extras
def test_openvino_export_keeps_training_statistics_and_instance_norm(tmp_path):
    """Instance norm must normalize with the statistics of each image, and batch norm with those of the training."""
    opts = (
        "MODEL.BACKBONE.NAME",
        "build_resnet_backbone",
        "MODEL.BACKBONE.DEPTH",
        "18x",
        "MODEL.BACKBONE.WITH_IBN",
        "True",
    )
    report = export(untrained(tmp_path / "ibn.pth", *opts, "MODEL.BACKBONE.FEAT_DIM", "512"), tmp_path / "ibn.xml")
    assert max(comparison.difference for comparison in report.comparisons) < 1e-4


@pytest.mark.integration
def test_exported_model_selects_camera_embeddings_by_the_camids_input(tmp_path, monkeypatch):
    depth = vit.Depth(vit.DEPTHS["base"].pretrained, width=32, blocks=1, heads=2)
    monkeypatch.setitem(vit.DEPTHS, "tiny", depth)
    opts = ("MODEL.BACKBONE.NAME", "build_vit_backbone", "MODEL.BACKBONE.DEPTH", "tiny")
    opts += ("MODEL.BACKBONE.FEAT_DIM", "32", "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(96, 32)")
    predictor = untrained(tmp_path / "vit.pth", *opts, "MODEL.BACKBONE.SIE_CAMERAS", "3")
    export(predictor, tmp_path / "vit.pt2")
    model, _ = loaded(tmp_path / "vit.pt2")
    images = torch.randint(256, (2, 3, 96, 32), dtype=torch.uint8)
    found = model({"images": images.float(), "camids": torch.tensor([2, 1])})
    torch.testing.assert_close(found, predictor.features(images, camids=[2, 1]), rtol=1e-4, atol=1e-4)
    other = model({"images": images.float(), "camids": torch.tensor([2, 0])})
    assert torch.equal(other[0], found[0]) and not torch.allclose(other[1], found[1])


def test_export_omits_modules_used_only_in_training(tmp_path):
    moco = ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "4096")
    predictor = untrained(tmp_path / "moco.pth", "MODEL.BACKBONE.NAME", "build_tiny_backbone", *moco)
    report = export(predictor, tmp_path / "moco.pt2")
    assert report.size < predictor.model.memory.queue.nbytes == 4 * tiny.WIDTH * 4096


def distorted(monkeypatch, change):
    """Patch the .pt2 format so that exported models return ``change(features)``."""
    plain = FORMATS[".pt2"]

    def runner(files):
        model = plain.runner(files)
        return lambda inputs: change(model(inputs))

    monkeypatch.setitem(FORMATS, ".pt2", Format(plain.title, plain.packages, plain.content, runner))


def test_export_with_failed_parity_check_keeps_the_existing_file(demo, checkpoint, tmp_path, monkeypatch, input_error):
    path = tmp_path / "out" / "model.pt2"
    path.parent.mkdir()
    path.write_text("the last one")
    for change, message in (
        (lambda features: features + features.std(), r"cosine.* 0\."),
        (lambda features: features * torch.nan, r"cosine.* nan"),
    ):
        distorted(monkeypatch, change)
        error = input_error(run, checkpoint, path, "--device", "cpu")
        assert re.search(message, error) and "random, batch of 3" in error and "fix:" in error
        monkeypatch.undo()
        monkeypatch.setenv("FASTAMP_DATASETS", str(demo))
    assert [file.name for file in path.parent.iterdir()] == ["model.pt2"] and path.read_text() == "the last one"


@pytest.mark.integration
def test_export_fails_if_map_decreases_by_more_than_tolerance(demo, checkpoint, tmp_path, monkeypatch, input_error):
    path = tmp_path / "model.pt2"
    monkeypatch.setitem(check.MIN_COSINE, "float32", -1.0)
    distorted(monkeypatch, lambda features: torch.randn(features.shape, generator=torch.Generator().manual_seed(3)))
    error = input_error(run, checkpoint, path, "--tolerance", "0", "--device", "cpu")
    lost = re.search(r"mAP .*by ([\d.]+) points", error)[1]
    assert re.search(rf"difference -{lost}\b", error) and not path.exists()
    assert run(checkpoint, path, "--tolerance", str(float(lost) + 0.1), "--device", "cpu") == 0 and path.exists()


def test_export_skips_map_comparison_if_configured_test_set_is_unknown(checkpoint, tmp_path, caplog):
    opts = ["DATASETS.TESTS", "('validation part of X',)"]
    report = export(fastamp.Predictor(checkpoint, device="cpu", opts=opts), tmp_path / "model.pt2")
    assert report.map_difference is None and "--data NAME" in caplog.text


def test_export_compares_only_random_images_if_test_set_is_missing(
    checkpoint, tmp_path, datasets_root, monkeypatch, predictor, caplog
):
    monkeypatch.setattr(check, "RankedImages", missing)
    report = export(predictor, tmp_path / "model.pt2")
    assert len(report.comparisons) == 3 and report.map_difference is None and "mAP" not in report.table()
    assert "random images" in caplog.text and "--data" in caplog.text
    with pytest.raises(DataError, match="dataset"):
        export(predictor, tmp_path / "other.pt2", data="Market1501")
    assert not (tmp_path / "other.pt2").exists()


def test_features_of_images_are_compared_for_tracklets(checkpoint, tmp_path):
    opts = ["MODEL.HEADS.TEMPORAL_POOL", "avg", "SOLVER.AMP.EVAL_DTYPE", "float32"]
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=opts)
    ranked = RankedImages(predictor, f"csv:{write_video(tmp_path)}", 0)
    features = ranked.features(lambda batch: predictor.compute([batch]))
    assert len(torch.unique(torch.cat(features), dim=0)) == 40  # 8 tracklets of 5 frames
    assert ranked.mean_average_precision(features) > 0


def missing(*args):
    raise DataError("the dataset is missing")


@needs_onnx
def test_export_rejects_invalid_arguments(predictor, checkpoint, tmp_path, monkeypatch, input_error):
    (tmp_path / "folder.onnx").mkdir()
    for path, options, message in (
        ("model.bin", {}, r"model.*\.onnx.*\.pt2"),
        ("model", {}, r"model.*\.onnx.*\.pt2"),
        ("folder.onnx", {}, "folder.onnx"),
        ("nowhere/model.pt2", {}, "nowhere"),
        ("model.pt2", {"precision": "fp61"}, "fp61.*'fp16'"),
        ("model.pt2", {"tolerance": -1}, "--tolerance.*-1"),
        ("model.pt2", {"opset": 18}, "--opset 18"),
        ("model.onnx", {"opset": 9}, r"--opset.*18.*9"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(predictor, tmp_path / path, **options)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r'pip install "fastamp\[export\]"'):
        export(predictor, tmp_path / "model.onnx")
    content = torch.load(checkpoint, weights_only=True)
    torch.save({"model": content["model"]}, tmp_path / "bare.pth")
    assert "config" in input_error(run, tmp_path / "bare.pth", tmp_path / "model.onnx", "--device", "cpu")
    assert {file.name for file in tmp_path.iterdir()} == {"folder.onnx", "bare.pth"}


def test_export_raises_if_model_cannot_be_traced(tmp_path, capfd):
    with pytest.raises(ExportError, match="GuardOnDataDependent"):
        export(
            untrained(tmp_path / "asking.pth", "MODEL.BACKBONE.NAME", "build_asking_backbone"), tmp_path / "model.pt2"
        )
    assert "Guard" not in "".join(capfd.readouterr()) and not (tmp_path / "model.pt2").exists()


@needs_onnx
def test_onnx_export_raises_if_model_exceeds_the_size_limit(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_format, "_PROTOBUF_LIMIT", 1000)
    with pytest.raises(ExportError, match="2 GiB"):
        export(predictor, tmp_path / "model.onnx", data="")
    assert not list(tmp_path.iterdir())
