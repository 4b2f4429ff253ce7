"""Exported files: the features of the checkpoint for every kind of input, and threads of the runtime."""

import io
import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import PIL.Image
import pytest
import torch
from random_calibration import random_calibration

import fastamp
from fastamp.data import decode
from fastamp.inference.export import export
from fastamp.inference.export.tflite_format import VARIABLE
from fastamp.inference.runtime import ExportedModel
from fastamp.inference.sessions import open_tflite
from fastamp.integrations import BoxmotReID, UltralyticsReID
from fastamp.retrieval.gallery_store import Item
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.utils.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.fixture(
    scope="module",
    params=[".onnx", *(pytest.param(suffix, marks=pytest.mark.extras) for suffix in (".xml", ".tflite"))],
)
def exported(request, predictor, tmp_path_factory):
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino", ".tflite": "ai_edge_quantizer"}[request.param])
    if request.param == ".tflite" and VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set")
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


def in_threads(function, *arguments):
    """Call a function in four threads; return the results in the order of the arguments."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(function, *arguments))


def check_threads(model):
    """Check that threads get the features of their own images, from a model and from the adapters."""
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, (60, 30, 3), dtype=np.uint8) for _ in range(60)]
    expected = torch.cat([model.features(frame) for frame in frames])
    assert torch.pdist(expected).min() > 1e-3
    torch.testing.assert_close(torch.cat(in_threads(model.features, frames)), expected, rtol=1e-4, atol=1e-5)
    corners, centers = [np.array([[0, 0, 30, 60]])] * 60, [np.array([[15, 30, 30, 60]])] * 60
    unit = torch.nn.functional.normalize(model.features(frames, color="bgr")).numpy()
    for found in (
        in_threads(BoxmotReID(model).get_features, corners, frames),
        in_threads(UltralyticsReID(model), frames, centers),
    ):
        np.testing.assert_allclose(np.concatenate(found).reshape(unit.shape), unit, rtol=1e-3, atol=1e-4)


def test_threads_share_an_exported_model(exported):
    check_threads(exported)


def test_threads_share_a_predictor(predictor):
    check_threads(predictor)


def test_threads_do_not_share_the_interpreter_of_a_tflite_file(monkeypatch):
    class Interpreter:
        """Interpreter whose only output holds the last inputs, as that of LiteRT."""

        def __init__(self, model_content, num_threads):
            self.output = np.zeros((1, 3), dtype=np.float32)

        def get_input_details(self):
            return [{"shape_signature": [1, 3]}]

        def get_signature_runner(self):
            def run(images):
                self.output[:] = images
                time.sleep(1e-4)
                return {"features": self.output}

            run.get_input_details = lambda: {"images": {"dtype": np.float32}}
            return run

    module = ModuleType("ai_edge_litert.interpreter")
    module.Interpreter = Interpreter
    monkeypatch.setitem(sys.modules, "ai_edge_litert", ModuleType("ai_edge_litert"))
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", module)
    session = open_tflite(b"")
    images = [np.full((2, 3), number, dtype=np.float32) for number in range(40)]
    found = in_threads(lambda image: session.run({"images": image}), images)
    np.testing.assert_array_equal(np.stack(found), np.stack(images))


def test_pickled_model_opens_its_file_again(exported, monkeypatch, tmp_path):
    monkeypatch.chdir(exported.checkpoint.parent)
    relative = ExportedModel(exported.checkpoint.name, threads=1)
    content = pickle.dumps(relative)
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(content)
    assert again.config_hash == exported.config_hash
    assert torch.equal(again.features(images()), exported.features(images()))


def test_boxes_without_pixels_are_nan(exported, predictor):
    frame, boxes = images()[0], [[0, 0, 30, 60], [500, 0, 600, 60], [5, 5, 35, 80]]
    found = exported.features(frame, boxes=boxes)
    assert found[1].isnan().all()
    assert_close(found[[0, 2]], predictor.features(frame, boxes=[boxes[0], boxes[2]]))
    assert exported.features(frame, boxes=[]).shape == (0, exported.feature_dim)


def test_boxes_are_pixels_of_a_large_frame(exported, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "_MAX_FULL_SIZE_PIXELS", 1000)
    frame = np.random.default_rng(0).integers(256, size=(1100, 1100, 3), dtype=np.uint8)
    PIL.Image.fromarray(frame).save(tmp_path / "frame.jpg")
    boxes = [[600, 600, 900, 1000]]
    actual = exported.features(tmp_path / "frame.jpg", boxes=boxes)
    assert_close(actual, exported.features(np.asarray(PIL.Image.open(tmp_path / "frame.jpg")), boxes=boxes))


def test_preprocess_equals_that_of_the_predictor(exported, predictor):
    for image in images():
        assert torch.equal(exported.preprocess(image, color="bgr"), predictor.preprocess(image, color="bgr"))
    pixels = [exported.preprocess(image) for image in images() * 3]
    torch.testing.assert_close(exported.features_of_preprocessed(pixels), exported.features(images() * 3))
    with pytest.raises(DataError, match="1 x 1"):
        exported.preprocess(np.zeros((0, 4, 3), dtype=np.uint8))


def test_comparison_and_search_equal_those_of_the_checkpoint(exported, predictor, tmp_path):
    queries = images()
    assert exported.compare(*queries[:2]).score == pytest.approx(predictor.compare(*queries[:2]).score, abs=1e-4)
    with MutableGallery(tmp_path / "a.gallery", predictor.model_id) as gallery:
        gallery.add([Item(str(number)) for number in range(4)], predictor.features(queries))
        found, expected = (model.search(queries, gallery, 3) for model in (exported, predictor))
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    assert found.decision is None
    with pytest.raises(ConfigError, match="camids"):
        exported.compare(*queries[:2], camids=[0, 1])
    with pytest.raises(ConfigError, match="attributes"):
        exported.require_output("attributes")


@pytest.mark.integration
@pytest.mark.parametrize("size", ["(64, 32)", "(40,)"])
def test_file_with_preprocessing_inside_crops_once(checkpoint, tmp_path, size):
    pytest.importorskip("onnxruntime")
    opts = ["INPUT.SIZE_TEST", size, "INPUT.CROP.ENABLED", "True", "INPUT.CROP.SIZE", "(32, 16)"]
    predictor = fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32", *opts])
    export(predictor, tmp_path / "model.onnx", preprocess="inside", color_order="bgr", data="")
    model = ExportedModel(tmp_path / "model.onnx", threads=1)
    expected = predictor.features(images())
    assert_close(model.features(images()), expected)
    assert_close(model.features_of_preprocessed([model.preprocess(image) for image in images()]), expected)
    arrays = [images()[0], images()[0][:50]]
    assert_close(model.features(arrays, color="bgr"), predictor.features(arrays, color="bgr"))


@pytest.mark.integration
@pytest.mark.parametrize("metric, l2, hashes_are_equal", [("cosine", True, True), ("euclidean", True, False)])
def test_calibration_and_hash_in_the_file(predictor, tmp_path, monkeypatch, metric, l2, hashes_are_equal):
    pytest.importorskip("onnxruntime")
    found = fastamp.Predictor(predictor.checkpoint, device="cpu", opts=["TEST.METRIC", metric])
    calibration = random_calibration(found)
    monkeypatch.setitem(vars(found), "calibration", calibration)
    export(found, tmp_path / "model.onnx", data="", l2=l2)
    model = ExportedModel(tmp_path / "model.onnx", threads=1)
    assert (model.config_hash == found.config_hash) == hashes_are_equal and model.metric == metric
    if not hashes_are_equal:
        assert model.calibration is None
        return
    expected, compared = found.compare(*images()[:2]), model.compare(*images()[:2])
    assert compared.decision == expected.decision
    assert compared.probability == pytest.approx(expected.probability, abs=0.01)
    with MutableGallery(tmp_path / "a.gallery", model.model_id) as gallery:
        gallery.add([Item(str(number)) for number in range(4)], model.features(images()))
        result = model.search(images()[0], gallery, 2)
    assert result.decision.known.tolist() == [True] and result.searched == 4
    np.testing.assert_allclose(result.decision.probabilities, calibration.probability(result.scores))


def test_other_suffix_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"\.onnx, \.xml"):
        ExportedModel(tmp_path / "model.pt2")
