"""Compare features and training losses of all models with FastReID's for the same weights."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.modeling import build_model

pytestmark = pytest.mark.integration

REFERENCE = Path(__file__).parents[1] / "reference"
MODELS = json.loads(gzip.decompress((REFERENCE / "fastreid_models.json.gz").read_bytes()))
EMBEDDINGS = np.load(REFERENCE / "fastreid_embeddings.npz")
ROOT = Path(__file__).parents[2]

BOT = "Market1501/bagtricks_R50.yml"
RESNET18 = f"{BOT} MODEL.BACKBONE.NAME build_resnet_backbone MODEL.BACKBONE.DEPTH 18x MODEL.BACKBONE.FEAT_DIM 512"
# The reference losses were computed with random drop path.
FEATURES_ONLY = ["Market1501/bagtricks_vit.yml"]


def reference_model(name, *overrides):
    recipe, *options = name.split(" ")
    cfg = read_config(ROOT / "configs" / recipe, [
        *options, *overrides, "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "751", "MODEL.DEVICE",
        "cpu", "SOLVER.AMP", "off",
    ])  # fmt: skip
    return build_model(cfg)


@pytest.mark.parametrize("name", MODELS, ids=str)
def test_model_features_and_losses_equal_fastreid(name):
    expected = MODELS[name]
    model = reference_model(name)
    state = reference_weights.state_dict(expected["state_dict"])
    report = load_model_state(model, state, source="the reference", min_match=1.0)
    assert not (report.missing or report.dropped or report.other_shape)
    assert sum(p.numel() for p in model.parameters()) == expected["num_parameters"]
    model.eval()
    with torch.no_grad():
        features = model({"images": reference_weights.images(expected["input_size"])}).numpy()
    reference = EMBEDDINGS[name]
    assert features.shape[1] == expected["feature_dim"]
    assert np.abs(features - reference).max() / np.abs(reference).max() < 1e-4
    if name in FEATURES_ONLY:
        return
    with torch.no_grad():
        images = reference_weights.images(expected["input_size"], n=4)
        losses = model.train()({"images": images, "targets": torch.tensor([3, 3, 9, 9])})
    assert {key: value.item() for key, value in losses.items()} == pytest.approx(expected["train_losses"], rel=1e-3)


def test_padded_stem_pooling_changes_resnet_features():
    """Negative control: the parameter names are the same, but the features differ."""
    model = reference_model(RESNET18, "MODEL.BACKBONE.STEM_POOL", "padded").eval()
    model.load_state_dict(reference_weights.state_dict(MODELS[RESNET18]["state_dict"]))
    with torch.no_grad():
        features = model({"images": reference_weights.images((256, 128))}).numpy()
    assert np.abs(features - EMBEDDINGS[RESNET18]).max() / np.abs(EMBEDDINGS[RESNET18]).max() > 1e-3
