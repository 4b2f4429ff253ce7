"""Negative controls of the parity check: known mistakes of exporters and preprocessing write no file."""

import pytest
import tiny
import torch
from torch import nn

import fastamp
from fastamp.config import read_config
from fastamp.data.transforms import Resize
from fastamp.inference.export import ExportError, export, preprocessing, quantize, trace
from fastamp.inference.export.preprocessing import Preprocessing
from fastamp.modeling import BACKBONE_REGISTRY, build_model
from fastamp.utils.errors import UserError

pytestmark = pytest.mark.integration

SIZE = (64, 32)
needs_onnx = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="ONNX export needs PyTorch 2.7"
)


@BACKBONE_REGISTRY.register()
def build_instance_norm_backbone(cfg):
    """Build a backbone with instance norm."""
    return nn.Sequential(
        nn.Conv2d(3, tiny.WIDTH, 8, 8),
        nn.InstanceNorm2d(tiny.WIDTH, affine=True),
        nn.ReLU(),
        nn.Conv2d(tiny.WIDTH, tiny.WIDTH, 1),
    )


@BACKBONE_REGISTRY.register()
def build_narrow_backbone(cfg):
    """Build a backbone in which the weights of one channel are thousands of times larger, but cancel each other."""
    first, second = nn.Conv2d(3, tiny.WIDTH, 8, 8, bias=False), nn.Conv2d(tiny.WIDTH, tiny.WIDTH, 1, bias=False)
    with torch.no_grad():
        first.weight[1] = first.weight[0]
        second.weight[0] = 0
        second.weight[0, :2] = torch.tensor([1000.0, -1000.0])[:, None, None]
    return nn.Sequential(first, nn.ReLU(), second)


@pytest.fixture
def predictor(demo, tmp_path_factory):
    """Function (backbone, options) -> Predictor with random weights."""

    def build(backbone, *opts):
        cfg = read_config("", [
            "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", f"build_{backbone}_backbone",
            "MODEL.BACKBONE.FEAT_DIM", str(tiny.WIDTH), "INPUT.SIZE_TEST", str(SIZE), "INPUT.SIZE_TRAIN", str(SIZE),
            "DATASETS.NAMES", "('Demo',)", "DATASETS.TESTS", "('Demo',)", *opts,
        ])  # fmt: skip
        path = tmp_path_factory.mktemp("model") / "model.pth"
        torch.save({"model": build_model(cfg).state_dict(), "config": cfg.dump()}, path)
        return fastamp.Predictor(path, device="cpu")

    return build


def refused(predictor, path, message, **options):
    with pytest.raises(ExportError, match=message):
        export(predictor, path, **options)
    assert not list(path.parent.iterdir())


def test_model_in_training_mode_is_refused(predictor, tmp_path, monkeypatch):
    """Batch norm would normalize with the statistics of the batch."""
    model = predictor("tiny")
    assert export(model, tmp_path / "model.pt2", data="").path.exists()
    (tmp_path / "model.pt2").unlink()
    original = trace._to_deploy_form

    def in_training_mode(net):
        net = original(net)
        for module in net.modules():
            module.train(isinstance(module, nn.BatchNorm2d))
        return net

    monkeypatch.setattr(trace, "_to_deploy_form", in_training_mode)
    refused(model, tmp_path / "model.pt2", "cosine", data="")


def test_instance_norm_with_the_statistics_of_the_batch_is_refused(predictor, tmp_path, monkeypatch):
    """As exported in training mode; a batch of one image has the same statistics, so that larger ones are needed."""
    model = predictor("instance_norm")
    assert export(model, tmp_path / "model.pt2", data="").path.exists()
    (tmp_path / "model.pt2").unlink()

    def extractor(*args, **kwargs):
        found = trace.FeatureExtractor(*args, **kwargs)
        for module in found.modules():
            if isinstance(module, nn.InstanceNorm2d):
                module.forward = lambda x, norm=module: nn.functional.batch_norm(
                    x, None, None, norm.weight, norm.bias, training=True
                )
        return found

    monkeypatch.setattr("fastamp.inference.export.export_model.FeatureExtractor", extractor)
    with pytest.raises(ExportError, match="cosine") as error:
        export(model, tmp_path / "model.pt2", data="")
    rows = [line.split() for line in str(error.value).splitlines() if line.startswith("random")]
    assert [float(row[-3]) > 0.9999 for row in rows] == [True, False, False]
    assert not list(tmp_path.iterdir())


@needs_onnx
def test_int8_with_one_scale_for_a_whole_tensor_is_refused(predictor, tmp_path, monkeypatch):
    """One scale for each output channel keeps the features, one for all rounds the smaller weights to zero."""
    from onnxruntime import quantization

    model = predictor("narrow")
    options = {"precision": "int8", "tolerance": 100, "calibration_images": 32}
    report = export(model, tmp_path / "model.onnx", **options)
    assert report.comparisons[-1].mean_cosine > 0.98 and report.metadata["quantization"]["float_layers"] == []
    (tmp_path / "model.onnx").unlink()
    original = quantization.QDQQuantizer

    def one_scale(model, per_channel, *args):
        *rest, options = args
        return original(model, False, *rest, {**options, "TensorQuantOverrides": {}})

    monkeypatch.setattr(quantization, "QDQQuantizer", one_scale)
    monkeypatch.setattr(quantize, "MAX_FLOAT", 0)
    refused(model, tmp_path / "model.onnx", "mean cosine", **options)


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=needs_onnx), ".pt2", ".ts"])
def test_fixed_batch_size_is_refused(predictor, tmp_path, monkeypatch, suffix):
    """The batch has two images in the tracing, and 1, 3 and 32 in the parity check."""
    model, original = predictor("tiny"), torch.export.export
    report = export(model, tmp_path / f"model{suffix}", data="")
    assert [comparison.count for comparison in report.comparisons] == [1, 3, 32]
    report.path.unlink()

    def fixed(*args, dynamic_shapes, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", fixed)
    forward = trace.FeatureExtractor.forward
    # torch.jit.trace records the number of images as a constant.
    changed = lambda self, images: forward(self, images) + torch.zeros(len(images), 1)  # noqa: E731
    monkeypatch.setattr(trace.FeatureExtractor, "forward", changed)
    with pytest.raises(UserError, match="batch of 1 images|shape mismatch"):
        export(model, report.path, data="")
    assert not list(tmp_path.iterdir())


def without_antialiasing(patch):
    def resized(self, images):
        pixels = images.permute(0, 3, 1, 2).float()
        return nn.functional.interpolate(pixels, (self.height, self.width), mode="bicubic").clamp(0, 255)

    patch.setattr(Preprocessing, "forward", resized)


def with_another_cubic_coefficient(patch):
    def kernel(distance, interpolation):
        near = (1.25 * distance - 2.25) * distance * distance + 1
        far = ((3.75 - 0.75 * distance) * distance - 6) * distance + 3
        return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))

    patch.setattr(preprocessing, "interpolation_kernel", kernel)


def with_another_interpolation(patch):
    original = Preprocessing.__init__
    linear = Resize(size=SIZE, interpolation="bilinear")
    patch.setattr(Preprocessing, "__init__", lambda self, resize, **options: original(self, linear, **options))


def with_swapped_channels(patch):
    original = Preprocessing.forward
    patch.setattr(Preprocessing, "forward", lambda self, images: original(self, images.flip(3)))


@pytest.mark.parametrize(
    "mistake",
    [without_antialiasing, with_another_cubic_coefficient, with_another_interpolation, with_swapped_channels],
)
@pytest.mark.parametrize("color_order", ["rgb", "bgr"])
def test_wrong_preprocessing_is_refused(predictor, mistake, color_order, tmp_path, monkeypatch):
    model = predictor("tiny")
    mistake(monkeypatch)
    refused(model, tmp_path / "model.pt2", "cosine", preprocess="inside", color_order=color_order, data="")


def test_missing_crop_is_refused(predictor, tmp_path, monkeypatch):
    model = predictor("tiny", "INPUT.SIZE_TEST", "(80, 40)", "INPUT.CROP.ENABLED", "True", "INPUT.CROP.SIZE", str(SIZE))
    original = Preprocessing.__init__
    resize = Resize(size=SIZE)
    monkeypatch.setattr(Preprocessing, "__init__", lambda self, _, **options: original(self, resize, **options))
    refused(model, tmp_path / "model.pt2", "cosine", preprocess="inside", data="")
