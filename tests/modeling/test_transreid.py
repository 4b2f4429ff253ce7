"""TransReID's models and FastReID's ViT: comparison of features for the same weights, and recipes."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.modeling import build_model
from fastamp.solver import build_lr_schedule

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests/reference"

pytestmark = pytest.mark.usefixtures("without_initialization")


def reference(origin, name):
    models = json.loads(gzip.decompress((REFERENCE / f"{origin}_models.json.gz").read_bytes()))
    return models[name], np.load(REFERENCE / f"{origin}_embeddings.npz")[name]


def recipe(path, *opts):
    return read_config(ROOT / "configs" / path, [
        "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "751", "MODEL.DEVICE", "cpu", "SOLVER.AMP",
        "off", *opts,
    ])  # fmt: skip


@pytest.fixture(scope="module", params=["vit_sie", "vit_transreid_stride"])
def transreid(request):
    """Model with the reference weights, its load report, a batch and the expected features."""
    expected, features = reference("transreid", request.param)
    if request.param == "vit_sie":
        cfg = recipe("Market1501/vit_base.yml", "MODEL.BACKBONE.SIE_CAMERAS", "6")
    else:
        cfg = recipe("Market1501/transreid_vit_base.yml")
    model = build_model(cfg).eval()
    state = reference_weights.state_dict(expected["state_dict"])
    report = load_model_state(model, state, source="reference")
    batch = {
        "images": reference_weights.images(expected["input_size"]),
        "camids": torch.tensor(expected["camids"]),
        "viewids": torch.tensor(expected["viewids"]),
    }
    return model, report, batch, features


@pytest.mark.integration
def test_transreid_features_equal_reference_implementation(transreid):
    model, report, batch, expected = transreid
    assert report.missing == report.other_shape == []
    # Unused: an ImageNet classifier, and with JPM the last block and norm of the backbone.
    unused = ("backbone.fc.",) if len(expected[0]) == 768 else ("backbone.fc.", "backbone.blocks.11.", "backbone.norm.")
    assert all(name.startswith(unused) for name in report.dropped)
    with torch.no_grad():
        features = model(batch)
        other_cameras = model(batch | {"camids": batch["camids"].flip(0)})
    assert features.shape == expected.shape
    assert reference_weights.difference(features, expected) < 1e-4
    assert reference_weights.difference(other_cameras, expected) > 1e-3  # negative control


@pytest.mark.integration
def test_vit_features_equal_fastreid():
    expected, features = reference("fastreid", "Market1501/bagtricks_vit.yml")
    model = build_model(recipe("Market1501/bagtricks_vit.yml")).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == expected["num_parameters"]
    report = load_model_state(model, reference_weights.state_dict(expected["state_dict"]), source="reference")
    assert report.missing == report.dropped == []
    with torch.no_grad():
        computed = model({"images": reference_weights.images(expected["input_size"])})
    assert reference_weights.difference(computed, features) < 1e-4


@pytest.mark.parametrize(
    "name, iters, cameras",
    [("Market1501", 202, 6), ("DukeMTMC", 258, 8), ("MSMT17", 509, 15), ("VeRi", 590, 20)],
)
@pytest.mark.parametrize("kind", ["vit_base", "transreid_vit_base"])
def test_transreid_recipes_have_published_settings(name, iters, cameras, kind):
    cfg = recipe(f"{name}/{kind}.yml")
    full, vehicles, base_lr = kind != "vit_base", name == "VeRi", 0.01 if name == "VeRi" else 0.008
    schedule = build_lr_schedule(cfg, iters)
    rates = [schedule.learning_rate(base_lr, epoch=epoch, steps_taken=epoch * iters) for epoch in range(120)]
    lowest = 0.002 * base_lr
    for epoch in range(5, 120):
        expected = lowest + (base_lr - lowest) * (1 + math.cos(math.pi * epoch / 120)) / 2
        assert rates[epoch] == pytest.approx(expected)
    assert rates[0] == pytest.approx(0.01 * base_lr) and rates == sorted(rates[:6]) + sorted(rates[6:], reverse=True)
    expected = {
        "SOLVER.BASE_LR": base_lr,
        "SOLVER.BIAS_LR_FACTOR": 2.0,
        "SOLVER.MAX_EPOCH": 120,
        "INPUT.SIZE_TRAIN": (256, 256) if vehicles else (256, 128),
        "INPUT.SIZE_TEST": (256, 256) if vehicles else (256, 128),
        "INPUT.INTERPOLATION": "bicubic",
        "INPUT.INTERPOLATION_TEST": "bilinear",
        "MODEL.BACKBONE.STRIDE_SIZE": (12, 12) if full else (16, 16),
        "MODEL.BACKBONE.SIE_CAMERAS": cameras if full else 0,
        "MODEL.BACKBONE.SIE_VIEWS": 8 if full and vehicles else 0,
        "MODEL.HEADS.NAME": "JPMHead" if full else "EmbeddingHead",
        "MODEL.HEADS.EVAL_FEAT": "before",
        "MODEL.HEADS.JPM.SHIFT": 8 if full and vehicles else 5,
        "DATASETS.MSMT17.VALIDATION": name == "MSMT17",
        "DATASETS.VERI.VIEWS": full and vehicles,
    }
    values = {key.path: value for key, value in cfg.keys_below()}
    assert {key: values[key] for key in expected} == expected
