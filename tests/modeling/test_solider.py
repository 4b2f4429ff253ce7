"""SOLIDER's Swin: features of the original program, its weights files, and bad input."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.modeling import build_model
from fastamp.modeling.backbones.solider import PaddedWindowAttention, SoliderSwin
from fastamp.modeling.backbones.swin import DEPTHS
from fastamp.modeling.infer_config import infer_config
from fastamp.solver import build_lr_schedule
from fastamp.utils.errors import ConfigError, WeightsError

REFERENCE = Path(__file__).parents[1] / "reference"
CASES = ("swin_tiny 384x128", "swin_tiny 384x128 semantic1.0")

pytestmark = pytest.mark.usefixtures("without_initialization")


def recipe(*opts):
    return read_config("MSMT17/solider_swin_tiny", [
        "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "751", "MODEL.DEVICE", "cpu",
        "SOLVER.AMP", "off", *opts,
    ])  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_features_and_losses_equal_the_original_program(case):
    expected = json.loads(gzip.decompress((REFERENCE / "foundation/solider_models.json.gz").read_bytes()))[case]
    arrays = np.load(REFERENCE / "foundation/solider_embeddings.npz")
    cfg = recipe(
        "MODEL.BACKBONE.SEMANTIC_WEIGHT", str(expected["semantic_weight"]), "MODEL.BACKBONE.DROP_PATH_RATIO", "0"
    )
    model = build_model(cfg).eval()
    state = reference_weights.state_dict(expected["state_dict"])
    report = load_model_state(model, state, source="reference")
    assert report.missing == report.other_shape == []
    without_effect = ("norm0.", "norm1.", "norm2.", "semantic_embed_w.3.", "semantic_embed_b.3.")
    assert all(name.removeprefix("backbone.").startswith(without_effect) for name in report.dropped)
    maps, images = [], reference_weights.images(expected["input_size"])
    # The last block of each stage; the stages themselves are not called as modules.
    hooks = [
        model.backbone.features[index][-1].register_forward_hook(lambda *args: maps.append(args[2]))
        for index in (1, 3, 5, 7)
    ]
    with torch.no_grad():
        features = model({"images": images})
        after = model.heads.bottleneck(features[..., None, None]).flatten(1)
    for hook in hooks:
        hook.remove()
    assert reference_weights.difference(features, arrays[case]) < 1e-4
    assert reference_weights.difference(after, arrays[f"{case} after"]) < 1e-4
    assert len(maps) == 4
    for stage, x in enumerate(maps):
        norm = nn.LayerNorm(x.shape[-1], eps=1e-5)
        norm.load_state_dict({name: state[f"base.norm{stage}.{name}"] for name in ("weight", "bias")})
        with torch.no_grad():
            mean = norm(x).mean(dim=(1, 2))
        assert reference_weights.difference(mean, arrays[f"{case} stage{stage}_mean"]) < 1e-4
    model.train()
    batch = {"images": reference_weights.images(expected["input_size"], 4), "targets": torch.tensor([3, 9, 3, 9])}
    with torch.no_grad():
        losses = model(batch)
    assert losses["loss_cls"] == pytest.approx(expected["train_losses"]["cls"], rel=1e-3)
    assert losses["loss_triplet"] == pytest.approx(expected["train_losses"]["triplet"], rel=1e-3)


def test_attention_equals_torchvision_where_several_windows_cover_the_map():
    arguments = {"dim": 8, "window_size": [7, 7], "shift_size": [3, 3], "num_heads": 2}
    attention, reference = PaddedWindowAttention(**arguments), ShiftedWindowAttention(**arguments)
    nn.init.normal_(reference.relative_position_bias_table)
    attention.load_state_dict(reference.state_dict())
    for shape in ((2, 16, 9, 8), (1, 14, 14, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(attention(x), reference(x))
    x = torch.randn(1, 12, 4, 8)  # one window covers the width: torchvision does not shift along it
    assert not torch.allclose(attention(x), reference(x), atol=1e-2)


def pretrained_state():
    """State dict of a tiny model in the layout of a pretraining checkpoint, without a prefix."""
    path = REFERENCE / "foundation/solider_models.json.gz"
    shapes = json.loads(gzip.decompress(path.read_bytes()))[CASES[0]]["state_dict"]
    names = {name.removeprefix("base."): shape for name, shape in shapes.items() if name.startswith("base.")}
    return reference_weights.state_dict(names)


@pytest.mark.integration
@pytest.mark.parametrize("wrapped", [True, False])
def test_pretraining_checkpoint_and_its_teacher_load_into_the_recipe(tmp_path, wrapped):
    state = pretrained_state()
    teacher = {f"backbone.{name}": value for name, value in state.items()} | {"head.mlp.0.weight": torch.zeros(2, 2)}
    student = {f"module.{name}": torch.zeros_like(value) for name, value in teacher.items()}
    content = {"student": student, "teacher": teacher, "epoch": 100} if wrapped else teacher
    torch.save(content, tmp_path / "solider.pth")
    model = build_model(
        recipe("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "solider.pth"))
    )
    loaded = model.backbone.state_dict()
    assert torch.equal(loaded["features.0.0.weight"], state["patch_embed.projection.weight"])
    assert torch.equal(loaded["semantic.2.scale.weight"], state["semantic_embed_w.2.weight"])
    assert not any(parameter.requires_grad for parameter in model.backbone.semantic.parameters())


def test_tables_of_another_window_are_resized(tmp_path):
    state = pretrained_state()
    name = "stages.0.blocks.0.attn.w_msa.relative_position_bias_table"
    state[name] = torch.linspace(0, 1, 23)[:, None, None].expand(23, 23, 3).reshape(-1, 3).clone()
    model = SoliderSwin(DEPTHS["tiny"])
    converted = model.convert_state_dict(state, [])["features.1.0.attn.relative_position_bias_table"]
    expected = torch.linspace(0, 1, 13)[:, None, None].expand(13, 13, 3).reshape(-1, 3)
    assert converted.shape == (169, 3) and (converted - expected).abs().max() < 0.05


@pytest.mark.integration
def test_config_of_a_fine_tuned_file_is_inferred():
    path = REFERENCE / "foundation/solider_models.json.gz"
    shapes = json.loads(gzip.decompress(path.read_bytes()))[CASES[0]]["state_dict"]
    state = reference_weights.state_dict(shapes)
    keys = infer_config(state, "file")
    assert (keys["MODEL.BACKBONE.NAME"], keys["MODEL.BACKBONE.DEPTH"]) == ("build_solider_backbone", "tiny")
    assert "MODEL.BACKBONE.SEMANTIC_WEIGHT" not in keys and keys["MODEL.HEADS.EVAL_FEAT"] == "before"
    assert keys["MODEL.HEADS.NUM_CLASSES"] == "751" and keys["MODEL.BACKBONE.FEAT_DIM"] == "768"
    without = {name: value for name, value in state.items() if "semantic_embed" not in name}
    keys = infer_config(without, "file")
    assert keys["MODEL.BACKBONE.SEMANTIC_WEIGHT"] == "-1"


def test_negative_weight_removes_the_layers_and_loads_files_that_have_them():
    model = SoliderSwin(DEPTHS["tiny"], semantic_weight=-1)
    report = load_model_state(model, pretrained_state(), source="file", backbone_prefix="")
    assert len(model.semantic) == 0 and report.missing == []
    with pytest.raises(ConfigError, match="SEMANTIC_WEIGHT"):
        recipe("MODEL.BACKBONE.SEMANTIC_WEIGHT", "1.5")


@pytest.mark.integration
def test_file_of_another_width_raises_weights_error(tmp_path):
    teacher = {f"backbone.{name}": value for name, value in pretrained_state().items()}
    torch.save({"teacher": teacher}, tmp_path / "tiny.pth")
    options = ("MODEL.BACKBONE.DEPTH", "base", "MODEL.BACKBONE.FEAT_DIM", "1024")
    with pytest.raises(WeightsError, match="tiny.pth"):
        build_model(
            recipe(
                "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "tiny.pth"), *options
            )
        )
    with pytest.raises(ConfigError, match="PRETRAIN_PATH"):
        build_model(recipe("MODEL.BACKBONE.PRETRAIN", "True"))


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
@pytest.mark.parametrize("data, large", [("Market1501", 8e-4), ("MSMT17", 2e-4)])
def test_recipes_have_published_settings(size, data, large):
    cfg = read_config(f"{data}/solider_swin_{size}")
    rate = 8e-4 if size == "tiny" else large
    schedule = build_lr_schedule(cfg, 100)
    # Formulas of the original program; e is the epoch from 1, and g the rate of a group.
    for g in (rate, 2 * rate):
        for e in range(1, 121):
            expected = 0.002 * rate + (g - 0.002 * rate) * (1 + math.cos(math.pi * e / 120)) / 2
            if e < 20:
                expected = 0.01 * rate + e * (g - 0.01 * rate) / 20
            assert schedule.learning_rate(g, epoch=e - 1, steps_taken=100 * (e - 1)) == pytest.approx(expected)
    expected = {
        "SOLVER.BIAS_LR_FACTOR": 2.0,
        "SOLVER.WEIGHT_DECAY": 1e-4,
        "SOLVER.IMS_PER_BATCH": 64,
        "SOLVER.MAX_EPOCH": 120,
        "INPUT.SIZE_TRAIN": (384, 128),
        "MODEL.BACKBONE.SEMANTIC_WEIGHT": 0.2,
        "MODEL.BACKBONE.DROP_PATH_RATIO": 0.1,
        "MODEL.LOSSES.TRI.MARGIN": 0.0,
        "MODEL.LOSSES.CE.EPSILON": 0.0,
        "MODEL.HEADS.EVAL_FEAT": "before",
    }
    values = {key.path: value for key, value in cfg.keys_below()}
    assert {path: values[path] for path in expected} == expected
