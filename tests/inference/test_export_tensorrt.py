"""Tests of TensorRT engines with a replacement of TensorRT, which needs a GPU: inputs, profile and messages."""

import json
import sys
from unittest import mock

import pytest
import torch

import fastamp
from fastamp.inference.export import FORMATS, ExportError, export
from fastamp.utils.errors import ConfigError

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="ONNX export needs PyTorch 2.7"
)


@pytest.fixture
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.fixture
def tensorrt(monkeypatch):
    """Replacement of TensorRT on a machine with a GPU; the "engine" is the ONNX file, which ONNX Runtime runs."""
    fake = mock.MagicMock()
    fake.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 1
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setattr("fastamp.inference.export.tensorrt_format._has_gpu", lambda: True)
    parser = fake.OnnxParser.return_value
    fake.Builder.return_value.build_serialized_network.side_effect = lambda *_: parser.parse.call_args[0][0]

    def engine(content):
        return FORMATS[".onnx"].runner({".onnx": content})

    monkeypatch.setattr("fastamp.inference.export.tensorrt_format.Engine", engine)
    return fake


@pytest.mark.integration
def test_engine_is_built_from_the_onnx_file_with_a_dynamic_batch(predictor, tensorrt, tmp_path):
    report = export(predictor, tmp_path / "model.engine", precision="fp16", data="")
    assert {each.images for each in report.comparisons} == {f"random, batch of {size}" for size in (1, 3, 32)}
    builder = tensorrt.Builder.return_value
    builder.create_network.assert_called_once_with(1 << 1)  # strongly typed: keeps the float32 parts of an fp16 file
    profile = builder.create_optimization_profile.return_value
    profile.set_shape.assert_called_once_with("images", *((batch, 3, 64, 32) for batch in (1, 8, 32)))
    builder.create_builder_config.return_value.add_optimization_profile.assert_called_once_with(profile)
    assert {each.name for each in tmp_path.iterdir()} == {"model.engine", "model.engine.json"}
    metadata = json.loads((tmp_path / "model.engine.json").read_text())
    assert metadata["max_batch"] == 32 and metadata["precision"] == "fp16"


@pytest.mark.integration
def test_failures_of_tensorrt_are_reported_and_write_no_file(predictor, tensorrt, tmp_path):
    parser = tensorrt.OnnxParser.return_value
    parser.parse.return_value, parser.num_errors = False, 1
    parser.get_error.return_value = "unsupported operator"
    with pytest.raises(ExportError, match="unsupported operator"):
        export(predictor, tmp_path / "model.engine", data="")
    parser.parse.return_value = True
    tensorrt.Builder.return_value.build_serialized_network.side_effect = lambda *_: None
    with pytest.raises(ExportError, match="cannot build"):
        export(predictor, tmp_path / "model.engine", data="")
    assert not list(tmp_path.iterdir())


def test_engine_that_cannot_be_read_is_an_error(monkeypatch):
    fake = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    fake.Runtime.return_value.deserialize_cuda_engine.return_value = None
    with pytest.raises(ExportError, match="cannot load the engine.*cannot be read"):
        FORMATS[".engine"].runner({".engine": b""})


def test_engine_computes_larger_batches_in_parts(monkeypatch):
    from fastamp.inference.export.tensorrt_format import Engine

    engine, sizes = Engine.__new__(Engine), []

    def features(inputs):
        sizes.append({name: len(each) for name, each in inputs.items()})
        return inputs["images"].flatten(1).sum(1, keepdim=True) + inputs["camids"][:, None]

    monkeypatch.setattr(engine, "_features", features, raising=False)
    inputs = {"images": torch.rand(70, 3, 2, 2), "camids": torch.arange(70)}
    torch.testing.assert_close(engine(inputs), inputs["images"].sum((1, 2, 3))[:, None] + inputs["camids"][:, None])
    assert sizes == [{"images": size, "camids": size} for size in (32, 32, 6)]


def test_machine_without_tensorrt_or_gpu_is_reported(predictor, tmp_path, monkeypatch):
    for module, cause in ((None, "tensorrt"), (mock.MagicMock(), "NVIDIA GPU, because")):
        monkeypatch.setitem(sys.modules, "tensorrt", module)
        monkeypatch.setattr("fastamp.inference.export.tensorrt_format._has_gpu", lambda: False)
        with pytest.raises(ConfigError, match=f"(?s){cause}.*trtexec"):
            export(predictor, tmp_path / "model.engine")
