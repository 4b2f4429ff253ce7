"""tools/benchmark/light_models.py: the recipes, the turns and the tables."""

import numpy as np
import pytest
from command import load_script

from fastamp.config import read_config

MODULE = load_script("tools/benchmark/light_models.py")


def test_models_are_recipes_and_all_runs_take_turns_on_both_batches():
    for recipe in MODULE.MODELS.values():
        read_config(recipe)
    order = []
    runs = {
        (name, "PyTorch", precision): lambda images, key=(name, precision): order.append((*key, len(images)))
        for name in ("a", "b")
        for precision in ("float32", "bf16")
    }
    batches = {size: np.zeros((size, 3, 4, 2), dtype=np.float32) for size in (1, 16)}
    times = MODULE.measure(runs, batches, rounds=3, repeats=2)
    turn = [
        (*key, size)
        for key in (("a", "float32"), ("a", "bf16"), ("b", "float32"), ("b", "bf16"))
        for size in (1, 1, 16)
    ]
    assert order == turn * 4  # the first round warms up
    assert times.keys() == {(key, size) for key in runs for size in batches}
    assert all(len(values) == 3 for values in times.values())
    table = MODULE.latency_table({(("a", "PyTorch", "float32"), 1): [3.0, 1.0, 2.0]}, ["a", "b"], 1)
    assert "2.0 (1.0-3.0)" in table and "OpenVINO int8" in table


@pytest.mark.parametrize(
    ("runtime", "opening", "options"),
    [
        ("onnxruntime", "open_onnx", {}),
        ("openvino", "open_openvino", {}),
        ("openvino", "open_openvino", {"precision": "bf16"}),
    ],
)
def test_a_session_takes_arrays(runtime, opening, options, tmp_path):
    pytest.importorskip(runtime)
    onnx = pytest.importorskip("onnx")
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["batch", 3])
    features = onnx.helper.make_tensor_value_info("features", onnx.TensorProto.FLOAT, ["batch", 3])
    node = onnx.helper.make_node("Neg", ["images"], ["features"])
    graph = onnx.helper.make_graph([node], "a", [images], [features])
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "a.onnx")
    session = getattr(MODULE, opening)(tmp_path / "a.onnx", threads=1, **options)
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (MODULE.session_run(session)(values) == -values).all()  # exact in bfloat16, too
