"""Tests of TFLite files.

Those that convert need an environment with litert-torch, named by FASTAMP_TFLITE_PYTHON; in the others, the result of
the conversion is ``tests/reference/tiny.tflite``, of the tiny backbone with the weights of ``reference_weights``.
"""

import importlib.util
import json
import os
import sys
import zipfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import reference_weights
import tiny
import torch
from every_backbone import config

import fastamp
from fastamp.config import get_cfg
from fastamp.inference.export import ExportError, export, quantize, tflite_format
from fastamp.inference.export.tflite_format import PACKAGES, VARIABLE
from fastamp.inference.runtime import ExportedModel
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError, WeightsError

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
needs_environment = pytest.mark.skipif(
    VARIABLE not in os.environ or importlib.util.find_spec("ai_edge_quantizer") is None,
    reason=f"{VARIABLE} is not set, or ai-edge-quantizer is not installed",
)


@pytest.fixture
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Return a function that creates a Python with the tested versions, which executes shell commands as its worker."""

    def create(worker="exit 1", versions=PACKAGES):
        folder = tmp_path / "environment"
        folder.mkdir()
        path = folder / "python"
        path.write_text(f"#!/bin/sh\ncase $2 in -c) echo '{versions}'; exit 0;; esac\n{worker}\n")
        path.chmod(0o755)
        monkeypatch.setenv(VARIABLE, str(path))

    return create


@pytest.fixture
def converted(demo, python, tmp_path):
    """Predictor with the weights of the reference file, which the worker returns."""
    pytest.importorskip("ai_edge_quantizer")
    python(f'cp {REFERENCE / "tiny.tflite"} "$3/model.tflite"')
    cfg = get_cfg()
    cfg.merge_from_list([
        "MODEL.BACKBONE.NAME", "build_tiny_backbone", "MODEL.BACKBONE.FEAT_DIM", tiny.WIDTH,
        "MODEL.HEADS.NUM_CLASSES", 16, "MODEL.HEADS.WITH_BNNECK", True, "INPUT.SIZE_TEST", (64, 32),
        "DATASETS.NAMES", ("Demo",), "DATASETS.TESTS", ("Demo",),
    ])  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in build_model(cfg).state_dict().items()}
    torch.save({"model": reference_weights.state_dict(shapes), "config": cfg.dump()}, tmp_path / "tiny.pth")
    return fastamp.Predictor(tmp_path / "tiny.pth", device="cpu")


def metadata_of(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("metadata.json"))


@pytest.mark.extras
@needs_environment
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_tflite_file_reproduces_features_and_carries_metadata(demo, predictor, tmp_path, precision):
    pytest.importorskip("ai_edge_litert")
    path = tmp_path / "model.tflite"
    report = export(predictor, path, precision=precision, tolerance=5)
    assert {"random, batch of 32", "Demo, 30 images"} < {comparison.images for comparison in report.comparisons}
    difference = max(comparison.difference for comparison in report.comparisons)
    assert difference < 1e-4 if precision == "float32" else 0 < difference < 0.02
    metadata = metadata_of(path)
    assert metadata["precision"] == precision and metadata["input_size"] == [64, 32]
    assert ExportedModel(path).metadata["config_hash"] == predictor.config_hash
    from ai_edge_litert.interpreter import Interpreter

    (images,) = Interpreter(model_path=str(path)).get_input_details()
    assert images["shape_signature"].tolist() == [-1, 3, 64, 32] and images["shape"].tolist() == [1, 3, 64, 32]
    assert str(tmp_path.parent).encode() not in path.read_bytes()  # no local paths


@pytest.mark.extras
@needs_environment
def test_int8_file_has_one_scale_for_each_output_channel_and_a_head_in_float32(demo, predictor, tmp_path, monkeypatch):
    interpreters = pytest.importorskip("ai_edge_litert.interpreter")
    path = tmp_path / "model.tflite"
    options = {"precision": "int8", "tolerance": 100, "calibration_images": 40}
    report = export(predictor, path, **options)
    assert report.comparisons[-1].mean_cosine > 0.98 and report.map_difference is not None
    quantization = metadata_of(path)["quantization"]
    assert (quantization["calibration_images"], quantization["float_layers"]) == (40, [])
    tensors = interpreters.Interpreter(model_path=str(path)).get_tensor_details()
    scales = [tensor["quantization_parameters"]["scales"] for tensor in tensors if tensor["dtype"] == np.int8]
    assert max(map(len, scales)) == len(np.unique(max(scales, key=len))) > 1
    head = [tensor for tensor in tensors if tensor["name"].startswith("model.heads")]
    assert head and np.int8 not in {tensor["dtype"] for tensor in head}

    monkeypatch.setattr(quantize, "MAX_ERROR", 1e-12)
    monkeypatch.setattr(quantize, "MAX_FLOAT", 1)
    export(predictor, path, **options)
    assert set(metadata_of(path)["quantization"]["float_layers"]) == {"model.backbone.0", "model.backbone.4"}
    tensors = interpreters.Interpreter(model_path=str(path)).get_tensor_details()
    assert all(len(tensor["quantization_parameters"]["scales"]) <= 1 for tensor in tensors)  # no weights


@pytest.mark.integration
@pytest.mark.extras
@needs_environment
def test_instance_norm_and_slices_take_batches(tmp_path, caplog):
    cfg = config("resnet 18x WITH_IBN", "DATASETS.TESTS", "()")
    torch.save({"model": build_model(cfg).state_dict(), "config": cfg.dump()}, tmp_path / "model.pth")
    export(fastamp.Predictor(tmp_path / "model.pth", device="cpu"), tmp_path / "model.tflite")  # batches of 3 and 32
    assert "one image at a time" not in caplog.text


@pytest.mark.extras
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_file_takes_batches_if_its_operators_do_not_contain_the_batch_size(
    converted, tmp_path, precision, monkeypatch, caplog
):
    path = tmp_path / "model.tflite"
    report = export(converted, path, precision=precision, tolerance=5)
    assert metadata_of(path) == report.metadata and "one image at a time" not in caplog.text
    names = [tensor["name"] for tensor in interpreter(path).get_tensor_details()]
    assert any(name.startswith("model.backbone.4:") for name in names)
    size = path.stat().st_size
    assert size < 16_000 if precision == "fp16" else size > 16_000
    rows = converted.features(images()), ExportedModel(path).features(images())
    assert torch.cosine_similarity(*rows).min() > 0.9999
    assert interpreter(path).get_input_details()[0]["shape_signature"].tolist() == [-1, 3, 64, 32]
    monkeypatch.setattr(tflite_format, "with_free_batch_size", lambda model: b"bad")
    export(converted, path, data="")
    assert interpreter(path).get_input_details()[0]["shape_signature"].tolist() == [1, 3, 64, 32]
    assert "one image at a time" in caplog.text
    torch.testing.assert_close(ExportedModel(path).features(images()), rows[0], rtol=0, atol=1e-4)


@pytest.mark.extras
def test_int8_quantizes_the_layers_of_the_trunks(converted, tmp_path, monkeypatch, caplog):
    path = tmp_path / "model.tflite"
    options = {"precision": "int8", "tolerance": 100, "calibration_images": 40}
    report = export(converted, path, **options)
    assert report.comparisons[-1].mean_cosine > 0.98 and report.map_difference is not None
    assert metadata_of(path)["quantization"]["float_layers"] == []
    assert int8_weights(path) == {tiny.WIDTH: 2}
    monkeypatch.setattr(quantize, "MAX_ERROR", 1e-12)
    monkeypatch.setattr(quantize, "MAX_FLOAT", 0.5)
    export(converted, path, **options)
    assert metadata_of(path)["quantization"]["float_layers"] in (["model.backbone.0"], ["model.backbone.4"])
    assert int8_weights(path) == {tiny.WIDTH: 1} and "1 of 2 layers" in caplog.text


def interpreter(path):
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_path=str(path))


def int8_weights(path):
    """Count the int8 tensors of each number of scales above 1."""
    tensors = [tensor for tensor in interpreter(path).get_tensor_details() if tensor["dtype"] == np.int8]
    counts = Counter(len(tensor["quantization_parameters"]["scales"]) for tensor in tensors)
    return {count: number for count, number in counts.items() if count > 1}


def images():
    return list(reference_weights.images((64, 32), n=5).byte())


@pytest.mark.integration
@pytest.mark.parametrize(
    "path, cause",
    [("", "not set"), ("/nowhere/python", "/nowhere"), (sys.executable, "No package metadata"), ("/bin/true", "not")],
)
def test_message_names_the_commands_that_create_the_environment(monkeypatch, path, cause):
    monkeypatch.setenv(VARIABLE, path)
    with pytest.raises(ConfigError, match=f"(?s){cause}.*pip install {PACKAGES}.*export {VARIABLE}="):
        tflite_format.check_environment()


@pytest.mark.integration
def test_other_versions_in_the_environment_are_named(python, monkeypatch, caplog):
    python(versions="litert-torch==0.10.0 torch==2.4.0")
    tflite_format.check_environment()
    assert "torch==2.4.0" in caplog.text and PACKAGES in caplog.text


@pytest.mark.extras
@needs_environment
def test_cpu_build_of_the_tested_versions_is_accepted(caplog):
    tflite_format.check_environment()
    assert not caplog.records


@pytest.mark.integration
def test_tflite_file_cannot_take_images_of_any_size(predictor, tmp_path):
    with pytest.raises(ConfigError, match="--preprocess inside.*fixed size"):
        export(predictor, tmp_path / "model.tflite", preprocess="inside")


@pytest.mark.extras
@pytest.mark.parametrize(
    "worker, cause",
    [
        ("echo 'NotImplementedError: an operator' >&2; exit 1", "NotImplementedError: an operator"),
        ("exit 3", "exit code 3"),
        ("kill -KILL $$", "SIGKILL, often because memory"),
        ("echo aborted >&2; kill -ABRT $$", "SIGABRT"),
    ],
)
def test_failed_conversion_is_reported_and_writes_no_file(python, predictor, tmp_path, worker, cause):
    python(worker)
    pytest.importorskip("ai_edge_quantizer")
    with pytest.raises(ExportError, match=cause):
        export(predictor, tmp_path / "model.tflite", data="")
    assert [path.name for path in tmp_path.iterdir()] == ["environment"]


@pytest.mark.extras
def test_exported_file_that_is_damaged_or_cannot_be_run_is_rejected(tmp_path):
    pytest.importorskip("ai_edge_litert")
    (tmp_path / "model.tflite").write_bytes(b"TFL3")
    with pytest.raises(WeightsError, match=r"model\.tflite.*TFLite"):
        ExportedModel(tmp_path / "model.tflite")


def test_file_with_a_zip_of_another_program_is_named_as_not_exported(tmp_path, monkeypatch):
    for name in ("ai_edge_litert", "ai_edge_litert.interpreter"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    with zipfile.ZipFile(tmp_path / "model.tflite", "w") as archive:
        archive.writestr("labels.txt", "person")
    with pytest.raises(WeightsError, match="`fastamp export`"):
        ExportedModel(tmp_path / "model.tflite")
