"""Tests of int8 export: calibration images, scales, layers in float32, and refusals."""

import json

import every_backbone
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from every_backbone import config

import fastamp
from fastamp.inference.export import FORMATS, MIN_COSINE, ExportError, calibration_images, export, quantize
from fastamp.inference.parity import RankedImages
from fastamp.modeling import build_model
from fastamp.modeling.backbones import vit
from fastamp.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="ONNX export needs PyTorch 2.7"
)


@pytest.fixture
def predictor(demo, checkpoint):
    return fastamp.Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


def int8_model(path):
    """Read an ONNX file; return its nodes, and its constants as arrays."""
    import onnx

    graph = onnx.load(path).graph
    return graph.node, {constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer}


def weight_scales(path):
    """Return the int8 weights of an ONNX file with their scales."""
    nodes, constants = int8_model(path)
    inputs = [node.input for node in nodes if node.op_type == "DequantizeLinear" and node.input[0] in constants]
    return [(constants[names[0]], constants[names[1]]) for names in inputs if constants[names[0]].dtype == np.int8]


def untrained(path, backbone, *opts):
    """Save a model of random weights, with the batch norm statistics of the demo's training images."""
    cfg = config(backbone, "DATASETS.NAMES", "Demo", "DATASETS.TESTS", "Demo", "MODEL.HEADS.NUM_CLASSES", "16", *opts)
    net = build_model(cfg)
    for batch in calibration_images.load_calibration_images(Stub(cfg), 64)[1]:
        with torch.no_grad():
            net(batch)
    torch.save({"model": net.state_dict(), "config": cfg.dump()}, path)
    return fastamp.Predictor(path, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


class Stub:
    """The config of a predictor."""

    def __init__(self, cfg):
        self.cfg = cfg


def test_calibration_images_are_spread_over_identities():
    labels = np.repeat([0, 1, 2, 3], [1, 2, 5, 12])
    images = calibration_images.spread_over_identities(labels, 9)
    assert images == calibration_images.spread_over_identities(labels, 9) and len(set(images)) == 9
    assert sorted(labels[images[:4]]) == [0, 1, 2, 3] and sorted(labels[images[4:7]]) == [1, 2, 3]
    assert sorted(calibration_images.spread_over_identities(labels, 100)) == list(range(20))


def test_calibration_images_have_the_preprocessing_of_the_evaluation(predictor):
    title, batches = calibration_images.load_calibration_images(predictor, 40)
    assert (title, [len(batch["images"]) for batch in batches]) == ("Demo", [32, 8])
    batch = batches[0]
    assert len(set(batch["targets"][:16].tolist())) == 16  # all identities
    for path, image in zip(batch["img_paths"][:3], batch["images"], strict=False):
        assert torch.equal(image, predictor.preprocess(path))


@pytest.mark.integration
def test_int8_export_keeps_features_and_has_one_scale_for_each_output_channel(predictor, tmp_path):
    path = tmp_path / "model.onnx"
    report = export(predictor, path, precision="int8", tolerance=100, calibration_images=40)
    assert [comparison.count for comparison in report.comparisons] == [
        1,
        3,
        32,
        30,
    ] and report.map_difference is not None
    assert report.comparisons[-1].mean_cosine > 0.98
    scales = weight_scales(path)
    assert len(scales) == 2
    for (weights, scale), largest in zip(scales, (64, 127), strict=True):  # 7 bits in the first layer
        assert scale.shape == (tiny.WIDTH,) and len(np.unique(scale)) > 1
        assert np.abs(weights.astype(int)).max((1, 2, 3)).tolist() == [largest] * tiny.WIDTH
    import onnxruntime

    metadata = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    quantization = json.loads(metadata["quantization"])
    assert metadata["precision"] == "int8" and quantization["float_layers"] == []
    assert (quantization["calibration_data"], quantization["calibration_images"]) == ("Demo", 40)
    content = path.read_bytes()
    assert str(tmp_path.parent).encode() not in content and b"/fastamp/" not in content  # no local paths


@pytest.mark.integration
def test_int8_export_takes_images_of_any_size_with_preprocessing_inside(predictor, tmp_path):
    options = {"preprocess": "inside", "color_order": "bgr", "calibration_images": 40, "tolerance": 100}
    report = export(predictor, tmp_path / "model.onnx", precision="int8", **options)
    assert report.comparisons[-1].mean_cosine > 0.98 and len(weight_scales(report.path)) == 2


@pytest.mark.integration
def test_int8_export_is_calibrated_with_the_cameras_of_the_training_images(demo, tmp_path, monkeypatch):
    depth = vit.Depth(vit.DEPTHS["base"].pretrained, width=32, blocks=1, heads=2)
    monkeypatch.setitem(vit.DEPTHS, "tiny", depth)
    monkeypatch.setitem(every_backbone.BACKBONES, "vit tiny", 32)
    predictor = untrained(tmp_path / "vit.pth", "vit tiny", "MODEL.BACKBONE.SIE_CAMERAS", "3")
    report = export(predictor, tmp_path / "vit.onnx", precision="int8", tolerance=100, calibration_images=40)
    assert report.comparisons[-1].mean_cosine > 0.9
    nodes, constants = int8_model(report.path)
    products = [node for node in nodes if node.op_type == "MatMul" and not set(node.input) & constants.keys()]
    outputs = {output: node for node in nodes for output in node.output}
    attention = [node for node in products if "Softmax" in {outputs[name].op_type for name in node.input}]
    assert len(attention) == 1  # in float32


def test_range_of_a_saturated_input_ends_where_the_output_is_constant():
    from onnx import TensorProto, helper

    shape = ["batch", 1]
    nodes = [helper.make_node("Add", ["images", "images"], [name], name=name) for name in ("swish", "sigmoid", "both")]
    nodes += [
        helper.make_node("HardSwish", ["swish"], ["a"]),
        helper.make_node("HardSigmoid", ["sigmoid"], ["b"], alpha=1 / 6),
        helper.make_node("HardSwish", ["both"], ["c"]),
        helper.make_node("Relu", ["both"], ["d"]),  # needs the whole range
        helper.make_node("Sum", ["a", "b", "c", "d"], ["features"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    images = torch.linspace(-10, 20, 31)[:, None]
    ranges = quantize._activation_ranges(model, [{"images": images[:16]}, {"images": images[16:]}])
    found = {name: ranges[name].range_value for name in ("swish", "sigmoid", "both")}
    assert found == {"swish": (-3, 40), "sigmoid": (-3, 3), "both": (-20, 40)}
    assert torch.equal(F.hardswish(images), F.hardswish(images.clamp(*quantize._SATURATION["HardSwish"])))
    assert torch.equal(F.hardsigmoid(images), F.hardsigmoid(images.clamp(*quantize._SATURATION["HardSigmoid"])))


@pytest.mark.integration
def test_layers_with_the_largest_errors_stay_in_float32(predictor, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(quantize, "MAX_ERROR", 1e-12)
    monkeypatch.setattr(quantize, "MAX_FLOAT", 1)
    path = tmp_path / "model.onnx"
    export(predictor, path, precision="int8", tolerance=100)
    assert not weight_scales(path) and "model.backbone.4" in caplog.text
    assert not any(node.op_type == "QuantizeLinear" for node in int8_model(path)[0])


def test_the_fewest_layers_are_selected_whose_errors_exceed_the_limit():
    errors = {"a": 4.0, "b": 30.0, "c": 1.0, "d": 5.0}  # 40 in total
    assert quantize.largest_errors(errors, 0.26, 1) == ["b"]
    assert quantize.largest_errors(errors, 0.2, 1) == ["b", "d"]
    assert quantize.largest_errors(errors, 0.0, 0.8) == ["b", "d", "a"]
    assert quantize.largest_errors(errors, 1.0, 1) == []


def test_int8_is_refused_without_test_images_or_training_images(predictor, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    with pytest.raises(DataError, match="--data NAME"):
        export(predictor, path, precision="int8", data="")
    with pytest.raises(ConfigError, match=r"ONNX.*OpenVINO"):
        export(predictor, tmp_path / "model.pt2", precision="int8")
    with pytest.raises(ConfigError, match="--calibration-images.*0"):
        export(predictor, path, precision="int8", calibration_images=0)
    with pytest.raises(ConfigError, match="--calibration-images.*fp16"):
        export(predictor, path, precision="fp16", calibration_images=8)
    predictor.cfg.defrost()
    for names, found in ((("Market1501",), "Market1501"), ((), "empty")):
        predictor.cfg.DATASETS.NAMES = names
        with pytest.raises(DataError, match=rf"(?s){found}.*fix: .*DATASETS.NAMES"):
            export(predictor, path, precision="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
def test_int8_export_with_too_large_a_loss_writes_no_file(predictor, tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    values = iter([80.0, 79.4])
    monkeypatch.setattr(RankedImages, "mean_average_precision", lambda self, features: next(values))
    with pytest.raises(ExportError, match=r"decreased by 0.60 points.*0.5"):
        export(predictor, path, precision="int8")
    monkeypatch.setitem(MIN_COSINE, "int8", 1.1)
    with pytest.raises(ExportError, match=r"cosine.*0\.9"):
        export(predictor, path, precision="int8")
    assert not path.exists()


@pytest.mark.integration
@pytest.mark.parametrize("backbone", ["resnet 18x WITH_IBN", "osnet_ain x0_25"])
def test_instance_norm_is_exported_in_evaluation_mode(demo, tmp_path, backbone):
    """The features of an image depend neither on the other images of the batch nor on its size."""
    path = tmp_path / "model.onnx"
    predictor = untrained(tmp_path / "model.pth", backbone)
    export(predictor, path, precision="int8", tolerance=100, calibration_images=32)
    nodes, _ = int8_model(path)
    assert any(node.op_type == "InstanceNormalization" for node in nodes)
    assert not any(attribute.name == "training_mode" and attribute.i for node in nodes for attribute in node.attribute)
    run = FORMATS[".onnx"].runner({".onnx": path.read_bytes()})
    images = torch.randint(256, (5, 3, 64, 32), generator=torch.Generator().manual_seed(0)).float()
    together = run({"images": images})
    for image, expected in zip(images, together, strict=True):
        torch.testing.assert_close(run({"images": image[None]})[0], expected, rtol=0, atol=1e-3 * together.abs().max())


@pytest.mark.extras
def test_openvino_executes_convolutions_in_int8(predictor, tmp_path):
    import openvino

    report = export(predictor, tmp_path / "model.xml", precision="int8", tolerance=100, calibration_images=40)
    assert report.comparisons[-1].mean_cosine > 0.98
    compiled = openvino.Core().compile_model(tmp_path / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    facts = [get_op.get_rt_info() for get_op in compiled.get_runtime_model().get_ops()]
    executed = [
        fact["runtimePrecision"].astype(str) for fact in facts if fact["layerType"].astype(str) == "Convolution"
    ]
    assert executed == ["u8", "u8"]
