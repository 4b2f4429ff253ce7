"""Tests of TFLite files.

Those that convert need an environment with litert-torch, named by FASTAMP_TFLITE_PYTHON; in the others, a stand-in
executes the commands of the worker, and its TFLite files are files of torch.export.
"""

import io
import json
import os
import signal
import sys
import zipfile
from unittest import mock

import numpy as np
import pytest
import torch
from every_backbone import config

import fastamp
from fastamp.inference.export import ExportError, export, tflite_format, tflite_quantize
from fastamp.inference.export.tflite_format import PACKAGES, TESTED, VARIABLE
from fastamp.inference.runtime import ExportedModel
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError, WeightsError

needs_environment = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")


@pytest.fixture
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


class StandIn:
    """Commands of the worker, without its packages.

    Args:
        takes_batches: if False, ``dynamic.tflite`` cannot be run.
        sensitive: operator that changes the features if it is in int8.
    """

    def __init__(self, takes_batches=True, sensitive=""):
        self.takes_batches, self.sensitive = takes_batches, sensitive
        self.commands, self.int8 = [], []

    def __call__(self, command, folder, *arguments, steps=0, title=""):
        self.commands.append(command)
        getattr(self, command)(folder, *arguments)

    def convert(self, folder, inputs):
        self.inputs = json.loads(inputs)
        program = (folder / "model.pt2").read_bytes()
        (folder / "model.tflite").write_bytes(packed(program, b"one"))
        (folder / "dynamic.tflite").write_bytes(packed(program, b"any" if self.takes_batches else b"bad"))

    def run(self, folder):
        kind, program = unpacked((folder / "model.tflite").read_bytes())
        if kind == b"bad":
            raise ExportError("it has another batch size")
        inputs = np.load(folder / "inputs.npz")
        module = torch.export.load(io.BytesIO(program)).module()
        features = module(**{name: torch.from_numpy(inputs[name]) for name in inputs.files}).detach()
        if kind == b"far":
            features[:, ::2] *= 0.5
        np.save(folder / "features.npy", features.numpy())

    def finish(self, folder, precision):
        self.precision = precision

    def operators(self, folder):
        trunk, head = ["", "model", "model.backbone"], ["", "model", "model.heads"]
        found = [
            ("image", "MUL", [False, True], [["", "model"]]),
            ("first", "CONV_2D", [False, True, True], [[*trunk, "model.backbone.1"], [*trunk, "model.backbone.0"]]),
            ("product", "CONV_2D", [False, False], [[*trunk, "model.backbone.2"]]),
            ("gate", "LOGISTIC", [False], [[*trunk, "model.backbone.2"]]),
            ("second", "CONV_2D", [False, True, True], [[*trunk, "model.backbone.5"], [*trunk, "model.backbone.4"]]),
            ("sum", "ADD", [False, False], [trunk]),
            ("shift", "ADD", [False, True], [trunk]),
            ("pool", "AVERAGE_POOL_2D", [False], [head]),
            ("both", "CONV_2D", [False, True], [trunk, head]),
        ]
        keys = ("name", "kind", "constants", "modules")
        (folder / "operators.json").write_text(json.dumps([dict(zip(keys, values, strict=True)) for values in found]))

    def calibrate(self, folder):
        self.calibrated = len(np.load(folder / "inputs.npz")["images"])

    def quantize(self, folder, names):
        self.int8 = [entry["name"] for entry in json.loads((folder / names).read_text())]
        _, program = unpacked((folder / "model.tflite").read_bytes())
        kind = b"far" if self.sensitive in self.int8 else b"int"
        (folder / "quantized.tflite").write_bytes(packed(program, kind))

    def errors(self, folder, names):
        found = [entry["name"] for entry in json.loads((folder / names).read_text())]
        self.probed = len(np.load(folder / "inputs.npz")["images"])
        (folder / "errors.json").write_text(json.dumps({name: 1e-4 + (name == self.sensitive) for name in found}))


def packed(program, kind):
    """Return the content of a file of the stand-in; ``kind`` has three letters."""
    return kind + len(program).to_bytes(8, "little") + program[::-1]  # not a zip archive


def unpacked(content):
    """Return the kind and the program of a file, to which an archive may have been appended."""
    return content[:3], content[11 : 11 + int.from_bytes(content[3:11], "little")][::-1]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Return a function that creates a Python with the tested versions, which executes shell commands as its worker."""

    def create(worker="exit 1", versions=TESTED):
        folder = tmp_path / "environment"
        folder.mkdir()
        path = folder / "python"
        path.write_text(f"#!/bin/sh\ncase $2 in -c) echo '{json.dumps(versions)}'; exit 0;; esac\n{worker}\n")
        path.chmod(0o755)
        monkeypatch.setenv(VARIABLE, str(path))

    return create


@pytest.fixture
def stand_in(python, monkeypatch):
    python()
    worker = StandIn()
    for module in (tflite_format, tflite_quantize):
        monkeypatch.setattr(module, "run_worker", worker)
    return worker


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

    monkeypatch.setattr("fastamp.inference.export.quantize.MAX_ERROR", 1e-12)
    monkeypatch.setattr(tflite_quantize, "MAX_ERROR", 1e-12)
    monkeypatch.setattr("fastamp.inference.export.quantize.MAX_FLOAT", 1)
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


@pytest.mark.integration
def test_file_takes_batches_if_its_operators_do_not_contain_the_batch_size(stand_in, predictor, tmp_path, caplog):
    path = tmp_path / "model.tflite"
    report = export(predictor, path, data="", precision="fp16")
    assert unpacked(path.read_bytes())[0] == b"any" and metadata_of(path) == report.metadata
    assert stand_in.commands == ["convert", "run", "run", "finish", "run", "run", "run"]
    assert stand_in.precision == "fp16"
    assert stand_in.inputs == {"images": [[1, 3, 64, 32], "float32"]}
    stand_in.takes_batches = False
    export(predictor, path, data="")
    assert unpacked(path.read_bytes())[0] == b"one" and "one image at a time" in caplog.text


@pytest.mark.integration
def test_int8_quantizes_the_layers_of_the_trunks(stand_in, demo, predictor, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fastamp.inference.export.quantize.MAX_FLOAT", 0.4)
    path = tmp_path / "model.tflite"
    options = {"precision": "int8", "tolerance": 100, "calibration_images": 40}
    export(predictor, path, **options)
    assert stand_in.int8 == ["first", "second", "sum"] and stand_in.calibrated == 40
    assert "errors" not in stand_in.commands and metadata_of(path)["quantization"]["float_layers"] == []
    stand_in.sensitive = "second"
    export(predictor, path, **options)
    assert stand_in.int8 == ["first", "sum"] and stand_in.probed == 16
    assert metadata_of(path)["quantization"]["float_layers"] == ["model.backbone.4"]
    assert "1 of 3 layers" in caplog.text and unpacked(path.read_bytes())[0] == b"int"


@pytest.mark.integration
@pytest.mark.parametrize(
    "path, cause",
    [("", "not set"), ("/nowhere/python", "/nowhere"), (sys.executable, "No package metadata"), ("/bin/true", "not")],
)
def test_message_names_the_commands_that_create_the_environment(predictor, tmp_path, monkeypatch, path, cause):
    monkeypatch.setenv(VARIABLE, path)
    with pytest.raises(ConfigError, match=f"(?s){cause}.*pip install {PACKAGES}.*export {VARIABLE}="):
        export(predictor, tmp_path / "model.tflite")


@pytest.mark.integration
def test_other_versions_in_the_environment_are_named(python, monkeypatch, caplog):
    python(versions=TESTED | {"torch": "2.4.0"})
    tflite_format.check_environment()
    assert "torch==2.4.0" in caplog.text and PACKAGES in caplog.text


@pytest.mark.integration
def test_cpu_build_of_the_tested_versions_is_accepted(python, caplog):
    python(versions=TESTED | {"torch": f"{TESTED['torch']}+cpu"})
    tflite_format.check_environment()
    assert not caplog.records


@pytest.mark.integration
def test_tflite_file_cannot_take_images_of_any_size(stand_in, predictor, tmp_path):
    with pytest.raises(ConfigError, match="--preprocess inside.*fixed size"):
        export(predictor, tmp_path / "model.tflite", preprocess="inside")


@pytest.mark.integration
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
    with pytest.raises(ExportError, match=cause):
        export(predictor, tmp_path / "model.tflite", data="")
    assert [path.name for path in tmp_path.iterdir()] == ["environment"]


@pytest.mark.integration
def test_python_that_has_vanished_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with pytest.raises(ExportError, match=f"No such file.*\n.*{VARIABLE}"):
        tflite_format.run_worker("run", tmp_path)


@pytest.mark.integration
def test_worker_is_stopped_if_the_export_is_interrupted(python, tmp_path, monkeypatch):
    python(f"echo $$ > {tmp_path}/pid; echo step; exec sleep 100")

    def interrupted(lines, steps, title):
        next(iter(lines))
        raise KeyboardInterrupt

    monkeypatch.setattr(tflite_format, "track", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tflite_format.run_worker("calibrate", tmp_path, steps=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)


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
