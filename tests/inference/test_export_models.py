"""Tests of export for every backbone, head and meta-architecture, in each format and precision."""

import re
import zipfile

import pytest
import torch
from every_backbone import BACKBONES, config

import fastamp
from fastamp.inference.export import export
from fastamp.modeling import build_model

pytestmark = pytest.mark.integration

_HIGHER = ("INPUT.SIZE_TRAIN", "(128, 64)", "INPUT.SIZE_TEST", "(128, 64)")
MODELS = {backbone: (backbone, ()) for backbone in BACKBONES} | {
    "GeM": ("resnet 18x", ("MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPoolingP")),
    "mean and maximum": ("resnet 18x", ("MODEL.HEADS.POOL_LAYER", "AdaptiveAvgMaxPool")),
    "FCHead": ("osnet x0_25", ("MODEL.HEADS.NAME", "FCHead", "MODEL.HEADS.EMBEDDING_DIM", "64")),
    "JPMHead": ("vit deit_small", ("MODEL.HEADS.NAME", "JPMHead", "MODEL.HEADS.JPM.PARTS", "2", *_HIGHER)),
    "MGN": ("resnet 18x", ("MODEL.META_ARCHITECTURE", "MGN", *_HIGHER)),
    "LightMBN": ("osnet x0_25", ("MODEL.META_ARCHITECTURE", "LightMBN", "MODEL.HEADS.EMBEDDING_DIM", "16")),
    "MoCo": ("resnet 18x", ("MODEL.META_ARCHITECTURE", "MoCo")),
    "Distiller": ("resnet 18x", ("MODEL.META_ARCHITECTURE", "Distiller", "KD.EMA.ENABLED", "True")),
    "cameras": ("vit deit_small", ("MODEL.BACKBONE.SIE_CAMERAS", "6", "MODEL.BACKBONE.SIE_VIEWS", "2")),
    "positions resized": ("vit deit_small", ("INPUT.SIZE_TEST", "(96, 48)")),
    "two stems": ("two_stem_resnet 18x", ("MODEL.BACKBONE.MODALITY", "")),
    "group norm": ("resnet 18x", ("MODEL.BACKBONE.NORM", "GN")),
    "frozen norm": ("resnet 18x", ("MODEL.BACKBONE.NORM", "FrozenBN")),
    "gray": ("resnet 18x", ("INPUT.CHANNELS", "1")),
    "mirrored": ("resnet 18x", ("TEST.FLIP.ENABLED", "True")),
}
FAST = {("repvgg A0", ".pt2", "float32"), ("two stems", ".pt2", "float32")}


def every_export():
    for model in MODELS:
        for suffix in (".onnx", ".pt2", ".xml", ".ts"):
            for precision in ("float32", "fp16"):
                chosen = (model, suffix, precision)
                yield pytest.param(*chosen, marks=[] if chosen in FAST else pytest.mark.export)


@pytest.mark.parametrize("model, suffix, precision", [*every_export()])
def test_exported_features_equal_pytorch_features_for_every_model_type(
    model, suffix, precision, tmp_path, caplog, record_property
):
    if suffix == ".xml":
        pytest.importorskip("openvino")
    if suffix == ".onnx" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        pytest.skip("ONNX export needs PyTorch 2.7")
    backbone, opts = MODELS[model]
    cfg = config(backbone, "DATASETS.TESTS", "()", *opts)
    net = build_model(cfg)
    batch = {
        "images": torch.randint(256, (8, cfg.INPUT.CHANNELS, *cfg.INPUT.SIZE_TRAIN), dtype=torch.uint8),
        **{name: torch.arange(8) // 4 for name in ("targets", "camids", "viewids", "modality")},
    }
    with torch.no_grad():
        net(batch)  # initializes batch norm statistics
    torch.save({"model": net.state_dict(), "config": cfg.dump()}, tmp_path / "model.pth")
    predictor = fastamp.Predictor(tmp_path / "model.pth", device="cpu")
    report = export(predictor, tmp_path / f"model{suffix}", precision=precision)
    difference = max(comparison.difference for comparison in report.comparisons)
    cosine = min(comparison.min_cosine for comparison in report.comparisons)
    record_property("export", (model, f"{suffix} {precision}", difference, cosine))  # printed by tests/conftest.py
    assert ("MODEL.BACKBONE.DEPLOY" in caplog.text) == (model == "repvgg A0")
    assert difference < (1e-4 if precision == "float32" else 0.02)
    weights = sum(tensor.nbytes for tensor in predictor.model.state_dict().values())
    if model not in ("MoCo", "repvgg A0"):
        assert bytes_of_weights(report) < (1.2 if precision == "float32" else 0.7) * weights


def bytes_of_weights(report):
    """Return the approximate size of the weights in an exported file."""
    if report.path.suffix in (".onnx", ".xml"):
        return report.size - 2**20
    with zipfile.ZipFile(report.path) as archive:
        entries = [entry for entry in archive.infolist() if re.search("/weights/|/constants/|/data/", entry.filename)]
    assert entries
    return sum(entry.file_size for entry in entries if not entry.filename.endswith(".json"))
