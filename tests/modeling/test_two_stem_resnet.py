"""The two-stem ResNet for visible-infrared images: reference features, mixed batches, gradients and errors."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch
import torch.nn.functional as F

from fastamp.checkpoint import Checkpointer
from fastamp.config import get_cfg
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.utils.errors import ConfigError, DataError

FOLDER = Path(__file__).parents[1] / "reference" / "methods"
RANKS = Path(__file__).parents[1] / "helpers" / "two_stem_ranks.py"


def config(depth="18x", **backbone):
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_two_stem_resnet_backbone"
    cfg.MODEL.BACKBONE.DEPTH = depth
    cfg.MODEL.BACKBONE.FEAT_DIM = 512 if depth == "18x" else 2048
    cfg.MODEL.HEADS.NUM_CLASSES = 395
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATASETS.CATEGORIES = {"modality": ["visible", "infrared"]}
    for name, value in backbone.items():
        cfg.MODEL.BACKBONE[name] = value
    return cfg


@pytest.mark.integration
def test_weights_of_the_agw_program_load_and_give_its_features(tmp_path):
    described = json.loads(gzip.decompress((FOLDER / "vi_agw_keys.json.gz").read_bytes()))
    expected = np.load(FOLDER / "vi_agw.npz")
    cfg = config("50x", WITH_NL=True, LAST_STRIDE=1, STEM_POOL="padded")
    cfg.MODEL.HEADS.POOL_LAYER = "GeneralizedMeanPooling"
    cfg.MODEL.HEADS.WITH_BNNECK = True
    model = build_model(cfg).eval()
    torch.save(reference_weights.state_dict(described["shapes"]), tmp_path / "agw.pth")
    Checkpointer(model, min_match=1.0).load(str(tmp_path / "agw.pth"))
    pixels = reference_weights.images(tuple(described["size"]))
    for modality, name in enumerate(("visible", "thermal")):
        for feat, kind in (("before", "pool"), ("after", "fc")):
            model.heads.eval_feat = feat
            with torch.no_grad():
                found = model({"images": pixels, "modality": torch.full((2,), modality)})
            found, reference = F.normalize(found, dim=1).numpy(), expected[f"{name}_{kind}"]
            assert np.abs(found - reference).max() < 1e-4 * np.abs(reference).max()


def test_each_image_of_a_mixed_batch_uses_its_stem():
    backbone = build_backbone(config()).eval()
    torch.nn.init.normal_(backbone.infrared_conv1.weight)
    pixels = torch.randn(5, 3, 32, 16)
    modality = torch.tensor([1, 0, 1, 1, 0])
    with torch.no_grad():
        found = backbone(pixels, modality=modality)
        single = [backbone(pixels, modality=torch.full((5,), number)) for number in (0, 1)]
    assert not torch.allclose(single[0], single[1])
    for row, number in enumerate(modality.tolist()):
        torch.testing.assert_close(found[row], single[number][row])


@pytest.mark.parametrize("modality", [[0, 0, 1, 1], [0] * 4, [1] * 4])
def test_all_parameters_have_gradients_and_statistics_are_of_one_modality(modality):
    backbone = build_backbone(config()).train()
    before = backbone.infrared_bn1.running_mean.clone()
    backbone(torch.randn(4, 3, 32, 16), modality=torch.tensor(modality)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
    assert torch.equal(before, backbone.infrared_bn1.running_mean) == (1 not in modality)
    assert (backbone.infrared_conv1.weight.grad != 0).any() == (1 in modality)


def test_missing_columns_and_wrong_modalities_are_errors():
    model = build_model(config()).eval()
    pixels = torch.zeros(2, 3, 32, 16)
    with pytest.raises(ConfigError, match=r"'modality'.*available columns: side"):
        model({"images": pixels, "side": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(DataError, match="visible"):
        model({"images": pixels, "modality": torch.tensor([0, -1])})
    cfg = config()
    cfg.DATASETS.CATEGORIES = {"modality": ["infrared", "visible"]}
    with pytest.raises(ConfigError, match="DATASETS.CATEGORIES"):
        build_backbone(cfg)


def test_default_modality_applies_to_images_without_the_column():
    model = build_model(config(MODALITY="infrared")).eval()
    torch.nn.init.normal_(model.backbone.infrared_conv1.weight)
    pixels = torch.randint(0, 256, (2, 3, 32, 16))
    with torch.no_grad():
        found = model(pixels)
        infrared, visible = (model({"images": pixels, "modality": torch.full((2,), number)}) for number in (1, 0))
    assert torch.equal(found, infrared) and not torch.equal(found, visible)


@pytest.mark.integration
def test_processes_with_and_without_images_of_a_modality_train_together(tmp_path):
    """Two ranks, one without infrared images: all gradients are equal; SyncBN, which would hang, is an error."""
    done = subprocess.run([sys.executable, str(RANKS), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=True) for rank in (0, 1))
    assert all(gradient is not None and torch.equal(gradient, second[name]) for name, gradient in first.items())
    assert (first["backbone.infrared_conv1.weight"] != 0).any()
    for rank in (0, 1):
        assert "MODEL.BACKBONE.NORM SyncBN with 2 processes" in (tmp_path / f"{rank}.txt").read_text()


@pytest.mark.integration
def test_config_of_weights_is_inferred():
    state = build_model(config(WITH_IBN=True)).state_dict()
    keys = infer_config(state, "weights")
    assert keys["MODEL.BACKBONE.NAME"] == "build_two_stem_resnet_backbone"
    assert (keys["MODEL.BACKBONE.DEPTH"], keys["MODEL.BACKBONE.WITH_IBN"]) == ("18x", "True")
    loaded = build_model(get_cfg().with_values(keys | {"MODEL.DEVICE": "cpu"}))
    assert loaded.state_dict().keys() == state.keys()


@pytest.mark.integration
def test_config_of_the_agw_program_is_inferred():
    described = json.loads(gzip.decompress((FOLDER / "vi_agw_keys.json.gz").read_bytes()))
    keys = infer_config(reference_weights.state_dict(described["shapes"]), "agw.t")
    assert keys["MODEL.BACKBONE.NAME"] == "build_two_stem_resnet_backbone"
    assert (keys["MODEL.BACKBONE.DEPTH"], keys["MODEL.BACKBONE.WITH_NL"]) == ("50x", "True")
    assert (keys["MODEL.HEADS.NUM_CLASSES"], keys["MODEL.HEADS.WITH_BNNECK"]) == ("395", "True")
