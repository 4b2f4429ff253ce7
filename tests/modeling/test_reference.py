"""Features and training losses of every ResNet recipe but MGN, against FastReID's under the same weights."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fastamp.config import get_cfg
from fastamp.modeling import build_model

REFERENCE = Path(__file__).parents[1] / "reference"
MODELS = json.loads(gzip.decompress((REFERENCE / "fastreid_models.json.gz").read_bytes()))
EMBEDDINGS = np.load(REFERENCE / "fastreid_embeddings.npz")
ROOT = Path(__file__).parents[2]

spec = importlib.util.spec_from_file_location("reference_weights", REFERENCE / "reference_weights.py")
reference_weights = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference_weights)

BOT = "Market1501/bagtricks_R50.yml"
RESNETS = [
    "DukeMTMC/bagtricks_R50.yml",
    f"{BOT} MODEL.BACKBONE.NAME build_resnet_backbone MODEL.BACKBONE.DEPTH 18x MODEL.BACKBONE.FEAT_DIM 512",
    f"{BOT} MODEL.HEADS.EMBEDDING_DIM 512",
    f"{BOT} MODEL.HEADS.POOL_LAYER AdaptiveAvgMaxPool",
    "DukeMTMC/AGW_R50.yml",
    "DukeMTMC/sbs_R50-ibn.yml",
]


@pytest.mark.parametrize("name", RESNETS)
def test_features_and_losses_equal_fastreids(name):
    expected = MODELS[name]
    recipe, *overrides = name.split(" ")
    cfg = get_cfg()
    cfg.merge_from_file(ROOT / "configs" / recipe.replace("DukeMTMC", "Market1501"))
    cfg.merge_from_list([*overrides, "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "751"])
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", "SOLVER.AMP", "off"])
    model = build_model(cfg)
    model.load_state_dict(reference_weights.state_dict(expected["state_dict"]))
    assert sum(p.numel() for p in model.parameters()) == expected["num_parameters"]
    model.eval()
    with torch.no_grad():
        features = model({"images": reference_weights.images(expected["input_size"])}).numpy()
        model.train()
        images = reference_weights.images(expected["input_size"], n=4)
        losses = model({"images": images, "targets": torch.tensor([3, 3, 9, 9])})
    reference = EMBEDDINGS[name]
    assert features.shape[1] == expected["feature_dim"]
    assert np.abs(features - reference).max() / np.abs(reference).max() < 1e-4
    assert {key: value.item() for key, value in losses.items()} == pytest.approx(expected["train_losses"], rel=1e-4)


def test_the_other_stem_pooling_gives_other_features():
    """The negative control: same keys, another function."""
    name = RESNETS[1]
    cfg = get_cfg()
    cfg.merge_from_file(ROOT / "configs" / BOT)
    cfg.merge_from_list(name.split(" ")[1:])
    cfg.merge_from_list(["MODEL.BACKBONE.STEM_POOL", "padded", "MODEL.BACKBONE.PRETRAIN", "False"])
    cfg.merge_from_list(["MODEL.HEADS.NUM_CLASSES", "751", "MODEL.DEVICE", "cpu", "SOLVER.AMP", "off"])
    model = build_model(cfg).eval()
    model.load_state_dict(reference_weights.state_dict(MODELS[name]["state_dict"]))
    with torch.no_grad():
        features = model({"images": reference_weights.images((256, 128))}).numpy()
    assert np.abs(features - EMBEDDINGS[name]).max() / np.abs(EMBEDDINGS[name]).max() > 1e-3
