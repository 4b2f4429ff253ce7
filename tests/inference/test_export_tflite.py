"""Tests of TFLite files; those that convert need an environment with litert-torch, named by FASTAMP_TFLITE_PYTHON."""

import json
import os
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch

import fastamp
from fastamp.inference.export import FORMATS, ExportError, export
from fastamp.inference.export.tflite_format import PACKAGES, VARIABLE
from fastamp.utils.errors import ConfigError

needs_environment = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")


@pytest.fixture
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.mark.extras
@needs_environment
@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_tflite_file_reproduces_features_and_carries_metadata(demo, predictor, tmp_path, precision):
    path = tmp_path / "model.tflite"
    report = export(predictor, path, precision=precision, tolerance=5)
    assert {"random, batch of 32", "Demo, 30 images"} < {each.images for each in report.comparisons}
    difference = max(each.difference for each in report.comparisons)
    assert difference < 1e-4 if precision == "float32" else 0 < difference < 0.02
    with zipfile.ZipFile(path) as archive:
        metadata = json.loads(archive.read("metadata.json"))
    assert metadata["max_batch"] == 1 and metadata["precision"] == precision and metadata["input_size"] == [64, 32]
    images = torch.randint(256, (3, 3, 64, 32), generator=torch.Generator().manual_seed(1)).float()
    found = FORMATS[".tflite"].runner({".tflite": path.read_bytes()})({"images": images})
    expected = predictor.features(images.to(torch.uint8))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize(
    "python, cause", [("", "not set"), ("/nowhere/python", "/nowhere"), (sys.executable, "no litert")]
)
def test_message_names_the_commands_that_create_the_environment(predictor, tmp_path, monkeypatch, python, cause):
    monkeypatch.setenv(VARIABLE, python)
    with pytest.raises(ConfigError, match=f"(?s){cause}.*pip install {PACKAGES}.*export {VARIABLE}="):
        export(predictor, tmp_path / "model.tflite")


def test_tflite_file_cannot_take_images_of_any_size(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setenv(VARIABLE, sys.executable)
    with pytest.raises(ConfigError, match="--preprocess inside.*fixed size"):
        export(predictor, tmp_path / "model.tflite", preprocess="inside")


def test_failed_conversion_is_reported_and_writes_no_file(predictor, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncase $1 in -c) exit 0;; esac\necho 'NotImplementedError: an operator' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))
    with pytest.raises(ExportError, match="TFLite conversion failed.*NotImplementedError: an operator"):
        export(predictor, tmp_path / "model.tflite", data="")
    assert [each.name for each in tmp_path.iterdir()] == ["python"]
