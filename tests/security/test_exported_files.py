"""Exported files of other people: one error for any metadata, and no large allocations."""

import itertools
import json

import numpy as np
import onnx
import pytest
from fuzz import bounded
from onnx import TensorProto, helper

from fastamp.inference.runtime import ExportedModel
from fastamp.utils.errors import UserError, WeightsError

WIDTH = 3
GOOD = {
    "config_hash": "123",
    "resize": [8, 4],
    "center_crop": None,
    "interpolation": "bilinear",
    "channels": 3,
    "color_order": "RGB",
    "normalization": "inside",
    "preprocess": "outside",
    "pixel_mean": [1.0, 2, 3],
    "pixel_std": [1.0, 2, 3],
    "l2": False,
    "metric": "cosine",
    "protocol": "market1501",
    "feature_width": WIDTH,
}
HOSTILE = {
    "config_hash": ["", "x" * 1000],
    "resize": [None, [], [-1], [0, 0], [10**6, 10**6], [8, "4"], [1.5, 2], [True, True], "8", {"a": 1}, [8, 4, 2]],
    "center_crop": [[0, 0], [10**6, 10**6], [8], "x", {}, -1, [8, [4]]],
    "interpolation": ["lanczos", ["bicubic"], None, 1, {}],
    "channels": [0, 2, -3, 1, 10**9, "three", 3.0, None, [3], True],
    "color_order": [["RGB"], "XYZ", None],
    "normalization": [None, "x", []],
    "preprocess": [None, "x", []],
    "pixel_mean": [[1], [], [1, 2, "3"], [1, 2, None], [1, 2, 10**400], {}, "123", [1, 2, [3]]],
    "pixel_std": [[0, 0, 0], [1, 2, -3], [1, 2], None, [True] * 3],
    "l2": ["no", None, 0, []],
    "metric": ["manhattan", None, ["cosine"], {}],
    "protocol": [["market1501"], None, "x" * 1000, 5],
    "feature_width": [0, -1, 2**40, 10**400, "three", None, 3.5, [3], 4],
    "bit_depth": [0, 10**400, "x", None, [8]],
    "decode_reduced": ["x", None, 1, []],
    "calibration": [
        [],
        5,
        {"config_hash": "123", "scores": 1},
        {"config_hash": "123", "scores": "x"},
        {"config_hash": "123"},
    ],
}


@pytest.fixture(scope="module")
def graph():
    """Graph of the mean of each channel."""
    inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, "height", "width"])]
    outputs = [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", 3])]
    node = helper.make_node("ReduceMean", ["images"], ["features"], axes=[2, 3], keepdims=0)
    body = helper.make_graph([node], "mean", inputs, outputs)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def features(graph, path, texts):
    model = onnx.ModelProto()
    model.CopyFrom(graph)
    helper.set_model_props(model, texts)
    onnx.save(model, path)
    loaded = ExportedModel(path, threads=1)
    str(loaded.protocol), str(loaded.calibration), loaded.config_hash
    return loaded.features(np.ones((9, 5, 3), np.uint8))


def as_texts(values):
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def test_metadata_of_an_export_are_accepted(graph, tmp_path):
    assert features(graph, tmp_path / "a.onnx", as_texts(GOOD)).tolist() == [[1, 1, 1]]


def test_hostile_metadata_are_an_error(graph, tmp_path, subtests):
    for name, value in [(name, value) for name, values in HOSTILE.items() for value in values]:
        with subtests.test(name=name, value=value), bounded(60, 2**30), pytest.raises(UserError, match="fix:"):
            features(graph, tmp_path / "a.onnx", as_texts(GOOD | {name: value}))


def test_missing_metadata_are_an_error(graph, tmp_path, subtests):
    for name in sorted(set(GOOD) - {"protocol", "preprocess"}):
        with subtests.test(name=name):
            texts = as_texts(GOOD)
            texts.pop(name)
            with pytest.raises(WeightsError, match="fix:"):
                features(graph, tmp_path / "a.onnx", texts)


def test_deep_and_large_metadata_end(graph, tmp_path, subtests):
    texts = ["[" * 10**5, '{"a":' * 10**5, "9" * 10**5, "x" * 20_000_000]
    for name, text in itertools.product(["resize", "calibration", "pixel_mean", "other"], texts):
        with subtests.test(name=name, text=text[:10]):
            try:
                with bounded(60, 2**30):
                    features(graph, tmp_path / "a.onnx", as_texts(GOOD) | {name: text})
            except WeightsError as error:
                assert len(str(error)) < 1000
            else:
                assert name == "other"
