"""Exported files: the features of the checkpoint for every kind of input, and threads of the runtime."""

import io

import numpy as np
import PIL.Image
import pytest
import torch

import fastamp
from fastamp.inference.export import export
from fastamp.inference.runtime import ExportedModel
from fastamp.utils.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.fixture(scope="module", params=[".onnx", pytest.param(".xml", marks=pytest.mark.extras)])
def exported(request, predictor, tmp_path_factory):
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino"}[request.param])
    path = tmp_path_factory.mktemp("exported") / f"model{request.param}"
    export(predictor, path, data="")
    return ExportedModel(path, threads=1)


def images():
    """Return an array, a PIL image, bytes of a PNG file, and a tensor."""
    array = np.random.default_rng(0).integers(0, 256, (90, 40, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(array[:70]).save(file, "PNG")
    tensor = torch.from_numpy(array[:, :30].copy()).movedim(2, 0)
    return [array, PIL.Image.fromarray(array[5:]), file.getvalue(), tensor]


def assert_close(found, expected):
    # The parity check of the export allows a cosine of 0.9999.
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.9999


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_features_are_those_of_the_checkpoint(exported, predictor, color):
    many = images() * 3  # more than one batch
    assert_close(exported.features(many, color=color), predictor.features(many, color=color))
    assert torch.cosine_similarity(exported.features(many[:1]), exported.features(many[:1], color="bgr")) < 0.9999


def test_boxes_without_pixels_are_nan(exported, predictor):
    frame, boxes = images()[0], [[0, 0, 30, 60], [500, 0, 600, 60], [5, 5, 35, 80]]
    found = exported.features(frame, boxes=boxes)
    assert found[1].isnan().all()
    assert_close(found[[0, 2]], predictor.features(frame, boxes=[boxes[0], boxes[2]]))


def test_preprocess_equals_that_of_the_predictor(exported, predictor):
    for image in images():
        assert torch.equal(exported.preprocess(image, color="bgr"), predictor.preprocess(image, color="bgr"))
    pixels = [exported.preprocess(image) for image in images() * 3]
    torch.testing.assert_close(exported.features_of_preprocessed(pixels), exported.features(images() * 3))
    with pytest.raises(DataError, match="no pixels"):
        exported.preprocess(np.zeros((0, 4, 3), dtype=np.uint8))


def test_other_suffix_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"\.onnx or \.xml"):
        ExportedModel(tmp_path / "model.pt2")
