"""Weights files of other programs: recognized, loaded completely, and with the features of a plain computation."""

import plain_networks as plain
import pytest
import torch
from reference_weights import difference, fill

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.inference.import_checkpoint import load_imported
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.utils.errors import WeightsError

pytestmark = pytest.mark.integration

IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
IMAGES = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(0)) * 255
PADDED = ("MODEL.BACKBONE.STEM_POOL", "padded")
BILINEAR = ("INPUT.INTERPOLATION", "bilinear")


def normalized(mean, std):
    return (IMAGES - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def classifier(w, classes, width, *, bias=True):
    w |= {"classifier.weight": fill("classifier.weight", (classes, width))}
    if bias:
        w["classifier.bias"] = fill("classifier.bias", (classes,))


def torchreid(network, classes, *args, **options):
    """Compute a network with the bias and class count of a file of torchreid."""

    def compute(w, x):
        feature = network(w, x, *args, **options)
        classifier(w, classes, feature.shape[1])
        return feature

    return compute


def resnet50(w, x, *, fc):
    pooled = plain.resnet50(w, x, last_stride=1 if fc else 2).mean((2, 3))
    return plain.fc_head(w, pooled) if fc else pooled


def strong_baseline(w, x):
    feature = w.bn(plain.resnet50(w, x, "base.", relu=False).mean((2, 3)), "bottleneck")
    classifier(w, 751, 2048, bias=False)
    return feature


def agw(w, x):
    maps = plain.resnet50(w, x, "base.", relu=False, non_local=True)
    feature = w.bn(plain.gem(w, maps, "global_pool.p", 2.7), "bottleneck")
    classifier(w, 751, 2048, bias=False)
    return feature


def cluster_contrast(w, x):
    numbered = ("0", "1", "{}")
    maps = plain.resnet50(Shifted(w), x, "base.", names=numbered)
    return w.bn(plain.gem(w, maps, "gap.p", 2.7), "feat_bn")


class Shifted(plain.Weights):
    """View of weights in which stage N of the network has the number N + 3 in a sequence."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def setdefault(self, name, value):
        first, second, *rest = name.split(".")
        if len(rest) > 1:
            second = str(int(second) + 3)
        return self.weights.setdefault(".".join((first, second, *rest)), value)


# Name -> (function, expected keys)
NETWORKS = {
    **{
        f"osnet{kind}_x{width}": (
            torchreid(plain.osnet, classes, width, kind),
            ("MODEL.BACKBONE.DEPTH", f"x{width}".replace(".", "_"), "MODEL.HEADS.NUM_CLASSES", str(classes), *BILINEAR),
        )
        for width, kind, classes in (
            *((width, "", 1041) for width in (1.0, 0.75, 0.5, 0.25)),
            *((width, "ain", 4101) for width in (1.0, 0.75, 0.5, 0.25)),
            (1.0, "ibn", 1000),
        )
    },
    "resnet50": (torchreid(resnet50, 751, fc=False), (*PADDED, "MODEL.BACKBONE.LAST_STRIDE", "2", *BILINEAR)),
    "resnet50_fc512": (torchreid(resnet50, 702, fc=True), (*PADDED, "MODEL.BACKBONE.LAST_STRIDE", "1", *BILINEAR)),
    "mobilenetv2_x1_0": (torchreid(plain.torchreid_mobilenet, 751, 1.0), BILINEAR),
    "mobilenetv2_x1_4": (torchreid(plain.torchreid_mobilenet, 751, 1.4), BILINEAR),
    "shufflenet": (torchreid(plain.torchreid_shufflenet, 1000), BILINEAR),
    "strong_baseline": (strong_baseline, (*PADDED, "MODEL.BACKBONE.STEM_RELU", "False", *BILINEAR)),
    "agw": (agw, (*PADDED, "MODEL.BACKBONE.STEM_RELU", "False", "MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPoolingP")),
    "cluster_contrast": (
        cluster_contrast,
        (*PADDED, "MODEL.BACKBONE.LAST_STRIDE", "1", "MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPoolingP"),
    ),
}


def imported(state, *opts):
    """Return the model of a file, and its inferred keys."""
    keys = infer_config(state, "file.pth")
    pairs = [word for pair in keys.items() for word in pair]
    cfg = read_config("", ["MODEL.DEVICE", "cpu", *pairs, *opts])
    return load_imported(cfg, state, "file.pth", {})[0].eval(), keys


@pytest.mark.parametrize("name", NETWORKS)
def test_features_of_published_layout_equal_plain_computation(name, caplog):
    compute, expected = NETWORKS[name]
    state = plain.Weights()
    with torch.no_grad():
        feature = compute(state, normalized(*IMAGENET))
        model, keys = imported(state)
        found = model({"images": IMAGES})
    assert difference(found, feature.numpy()) < 1e-4 and difference(feature[:1], feature[1:].numpy()) > 0.01
    pairs = dict(zip(expected[::2], expected[1::2], strict=True))
    assert pairs.items() <= keys.items() and not {"MODEL.PIXEL_MEAN", "MODEL.HEADS.EVAL_FEAT"} & keys.keys()
    assert "initial values" not in caplog.text
    report = load_model_state(model, state, source="file.pth", allow_missing=False)
    assert report.backbone_fraction == 1 and not report.missing and {*report.dropped} <= {"heads.classifier.bias"}


def filled(network):
    """Return the names and shapes of a network of timm, which the hub's files have, with generated weights."""
    return {name: fill(name, tuple(value.shape)) for name, value in network.state_dict().items()}


def test_features_of_miewid_equal_plain_computation():
    """EfficientNetV2 of timm, mean with a learned exponent, and batch norm (wbia_miew_id/models/model.py)."""
    timm = pytest.importorskip("timm")
    network = timm.create_model("efficientnetv2_rw_t", num_classes=0, global_pool="").eval()
    weights = filled(network)
    network.load_state_dict(weights)
    state = plain.Weights({f"backbone.{name}": value for name, value in weights.items()})
    images = torch.nn.functional.interpolate(normalized(*IMAGENET), (440, 440))
    with torch.no_grad():
        feature = state.bn(plain.gem(state, network.forward_features(images), "pooling.p", 2.4), "bn")
        model, keys = imported(state)
        model.take_normalized_images()
        assert difference(model({"images": images}), feature.numpy()) < 1e-4
    assert keys["MODEL.BACKBONE.NAME"] == "timm/efficientnetv2_rw_t" and keys["INPUT.SIZE_TEST"] == "(440, 440)"
    report = load_model_state(model, state, source="file.pth", allow_missing=False)
    assert report.backbone_fraction == 1 and not report.missing and not report.dropped
    narrow = {"bn.running_mean": torch.ones(768), "pooling.p": torch.ones(1)}
    with pytest.raises(WeightsError, match="MODEL.BACKBONE.NAME"):
        infer_config(narrow, "file.pth")


@pytest.mark.parametrize("order", ["of the hub", "of the authors"])
def test_swin_of_timm_is_not_taken_for_solider(order):
    """MegaDescriptor's files have timm's names, the older ones with the patch merging at the end of a stage."""
    timm = pytest.importorskip("timm")
    network = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0).eval()
    state = filled(network)
    network.load_state_dict(state)
    if order == "of the authors":
        stages = {f"layers.{stage}.downsample": f"layers.{stage - 1}.downsample" for stage in (1, 2, 3)}
        state = {
            next((name.replace(a, b) for a, b in stages.items() if a in name), name): v for name, v in state.items()
        }
    images = torch.nn.functional.interpolate(normalized(*IMAGENET), (224, 224))
    size = "(224, 224)"
    with torch.no_grad():
        for opts in ((), ("MODEL.BACKBONE.NAME", "timm/swin_tiny_patch4_window7_224")):
            model, keys = imported(state, "INPUT.SIZE_TRAIN", size, "INPUT.SIZE_TEST", size, *opts)
            model.take_normalized_images()
            assert difference(model({"images": images}), network(images).numpy()) < 1e-4
            report = load_model_state(model, state, source="file.pth", allow_missing=False)
            assert report.backbone_fraction == 1 and not report.missing
    assert keys["MODEL.BACKBONE.NAME"] == "build_swin_backbone" and keys["MODEL.HEADS.WITH_BNNECK"] == "False"


# Characteristic names of torchreid's mlfn.py and hacnn.py
REFUSED = {
    "MLFN": ("feature.0.fm_conv1", "feature.0.fsm.1", "feature.15.fm_bn3", "fc_s.0", "fc_x.0", "conv1"),
    "HACNN": ("inception1.0.stream1.0.conv", "ha1.hard_attn.fc", "local_conv1.stream3.1.conv", "fc_local.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_networks_without_backbone_are_refused_by_name(name):
    state = {f"{part}.weight": torch.ones(4, 4) for part in REFUSED[name]}
    with pytest.raises(WeightsError, match=f"{name}(.|\n)*fix: .*--plugin"):
        infer_config(state, "file.pth")
    model = build_model(read_config("", ["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512"]))
    with pytest.raises(WeightsError, match=f"{name}(.|\n)*fix: .*--plugin"):
        load_model_state(model, state, source="file.pth")


def test_stem_changes_features_and_is_reported():
    """Negative control: without the keys of the stem, the features of the strong baseline differ."""
    state = plain.Weights()
    with torch.no_grad():
        feature = strong_baseline(state, normalized(*IMAGENET))
    for key, value in (("STEM_RELU", "True"), ("STEM_POOL", "ceil")):
        model, _ = imported(state, f"MODEL.BACKBONE.{key}", value)
        with torch.no_grad():
            assert difference(model({"images": IMAGES}), feature.numpy()) > 1e-3
        assert key in " ".join(load_model_state(model, state, source="file.pth").notes)
