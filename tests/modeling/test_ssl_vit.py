"""Vision Transformers of PASS and TransReID-SSL: features of the original programs, and weights files."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import reference_weights
import torch
from torch import nn

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.modeling import build_model
from fastamp.modeling.backbones.vit import DEPTHS, VisionTransformer
from fastamp.modeling.heads import PartTokenHead
from fastamp.modeling.infer_config import infer_config
from fastamp.solver import build_lr_schedule
from fastamp.utils.errors import ConfigError

REFERENCE = Path(__file__).parents[1] / "reference"
RECIPES = {"pass": "Market1501/pass_vit_small", "ssl": "Market1501/ssl_vit_small"}

pytestmark = pytest.mark.usefixtures("without_initialization")


def reference(project):
    return json.loads(gzip.decompress((REFERENCE / f"foundation/{project}_models.json.gz").read_bytes()))


def recipe(name, *opts):
    options = ["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", "751", "MODEL.DEVICE", "cpu"]
    return read_config(name, [*options, "SOLVER.AMP", "off", *opts])


CASES = [(project, case) for project in RECIPES for case in reference(project) if case != "lr"]


@pytest.mark.integration
@pytest.mark.parametrize("project, case", CASES)
def test_features_and_losses_equal_the_original_program(project, case, tmp_path):
    expected = reference(project)[case]
    arrays = np.load(REFERENCE / f"foundation/{project}_embeddings.npz")
    options = ["MODEL.BACKBONE.DROP_PATH_RATIO", "0"]
    for key in ("INPUT.SIZE_TRAIN", "INPUT.SIZE_TEST"):
        options += [key, str(expected["input_size"])]
    state = reference_weights.state_dict(expected["state_dict"])
    if expected["weights_from"] == "checkpoint":
        model = build_model(recipe(RECIPES[project], *options)).eval()
        report = load_model_state(model, state, source="reference")
        assert report.missing == report.other_shape == []
        assert report.dropped == ["backbone.fc.weight", "backbone.fc.bias"]  # of ImageNet
    else:  # a pretrained file, in the layout of DINO, and the head of its own
        teacher = {f"module.backbone.{name}": value for name, value in state.items()}
        torch.save({"student": {}, "teacher": teacher}, tmp_path / "file.pth")
        options += ["MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "file.pth")]
        model = build_model(recipe(RECIPES[project], *options)).eval()
        load_model_state(model.heads, reference_weights.state_dict(expected["state_dict_own"]), source="head")
    images = reference_weights.images(expected["input_size"])
    with torch.no_grad():
        features = model({"images": images})
        model.heads.eval_feat = "after"
        after = model({"images": images})
    assert reference_weights.difference(features, arrays[case]) < 1e-4
    assert reference_weights.difference(after, arrays[f"{case} after"]) < 1e-4
    model.train()
    batch = {"images": reference_weights.images(expected["input_size"], 4), "targets": torch.tensor([3, 9, 3, 9])}
    with torch.no_grad():
        losses = model(batch)
    assert losses["loss_cls"] == pytest.approx(expected["train_losses"]["cls"], rel=1e-3)
    assert losses["loss_triplet"] == pytest.approx(expected["train_losses"]["triplet"], rel=1e-3)


@pytest.mark.parametrize("project", RECIPES)
def test_learning_rates_equal_the_original_program(project):
    settings = next(iter(reference(project)["lr"].values()))
    cfg = recipe(RECIPES[project])
    schedule = build_lr_schedule(cfg, 100)
    base = settings["base_lr"]
    assert (base, settings["epochs"]) == (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_EPOCH)
    for epoch, rates in settings["[weights, biases]"].items():
        number = int(epoch) - 1
        found = [schedule.learning_rate(g, epoch=number, steps_taken=100 * number) for g in (base, 2 * base)]
        assert found == pytest.approx(rates, rel=1e-6)


@pytest.mark.integration
def test_config_of_a_fine_tuned_file_is_inferred():
    state = reference_weights.state_dict(reference("pass")["pass_vit_small 256x128"]["state_dict"])
    keys = infer_config(state, "file")
    assert keys["MODEL.HEADS.NAME"] == "PartTokenHead" and keys["MODEL.BACKBONE.PART_TOKENS"] == "3"
    assert keys["INPUT.SIZE_TRAIN"] == "(256, 128)" and keys["MODEL.BACKBONE.DEPTH"] == "deit_small"
    assert keys["MODEL.HEADS.PART_TOKENS.SEPARATE_NECKS"] == "True"
    model = build_model(read_config("", ["MODEL.DEVICE", "cpu", *(text for pair in keys.items() for text in pair)]))
    assert load_model_state(model, state, source="file").missing == []
    # The same from the model's own names.
    assert infer_config(model.state_dict(), "file")["MODEL.HEADS.NAME"] == "PartTokenHead"


def ics(**options):
    return VisionTransformer(depth=DEPTHS["deit_small"], image_size=(64, 32), stem_norm="BN", **options)


def test_convolutional_stem_has_the_names_of_transreid_ssl():
    with torch.device("meta"):
        names = {name for name in ics().patch_embed.state_dict() if "num_batches" not in name}
    normalized = {
        f"conv.{index}.{part}.{kind}" for index in (1, 4) for part in ("IN", "BN") for kind in ("weight", "bias")
    }
    normalized |= {f"conv.7.{kind}" for kind in ("weight", "bias")}
    statistics = {f"conv.{name}.running_{kind}" for name in ("1.BN", "4.BN", "7") for kind in ("mean", "var")}
    assert names == normalized | statistics | {
        "conv.0.weight",
        "conv.3.weight",
        "conv.6.weight",
        "proj.weight",
        "proj.bias",
    }


def test_convolutional_stem_equals_a_plain_computation():
    stem = ics().patch_embed.eval()
    images = torch.randn(2, 3, 64, 32)
    x = images
    for index, (size, stride) in zip((0, 3, 6), ((7, 2), (3, 1), (3, 1)), strict=True):
        x = nn.functional.conv2d(x, stem.conv[index].weight, stride=stride, padding=size // 2)
        first = nn.functional.instance_norm(x[:, :32]) if index < 6 else x[:, :32]
        x = torch.cat((first, x[:, 32:]), dim=1)
        x[:, (32 if index < 6 else 0) :] /= (1 + 1e-5) ** 0.5  # batch norm with initial statistics
        x = x.relu()
    expected = nn.functional.conv2d(x, stem.proj.weight, stem.proj.bias, stride=8)
    tokens, grid = stem(images)
    assert grid == (4, 2)
    torch.testing.assert_close(tokens, expected.flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("fusion", ["cat", "mean"])
def test_part_token_head_equals_a_plain_computation(fusion, separate):
    head = PartTokenHead(
        feat_dim=4,
        parts=3,
        fusion=fusion,
        separate_necks=separate,
        num_classes=5,
        eval_feat="after",
        pool_layer="Identity",
    )
    tokens = torch.randn(6, 4, 4, 1)
    norm = head.bottleneck[0]
    nn.init.uniform_(norm.weight, 0.5, 1.5)

    def fuse(maps):
        parts = (maps[1] + maps[2] + maps[3]) / 3
        return torch.cat((maps[0], parts), dim=1) if fusion == "cat" else (maps[0] + parts) / 2

    def normalize(x, weight):
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() * weight

    columns = [tokens[:, :, index, 0] for index in range(4)]
    before = fuse(columns)
    if separate:
        after = fuse([normalize(x, weight) for x, weight in zip(columns, norm.weight.view(4, 4), strict=True)])
    else:
        after = normalize(before, norm.weight)
    outputs = head(tokens, torch.arange(6) % 5)
    torch.testing.assert_close(outputs["features"], before)
    torch.testing.assert_close(outputs["pred_class_logits"], after @ head.weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options, match",
    [
        (("MODEL.BACKBONE.STEM_CONV", "True", "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)"), "STRIDE_SIZE"),
        (("MODEL.BACKBONE.PART_TOKENS", "0"), "PART_TOKENS"),
        (("MODEL.HEADS.NAME", "JPMHead"), "PartTokenHead"),
        (("MODEL.HEADS.EMBEDDING_DIM", "64"), "EMBEDDING_DIM"),
    ],
)
def test_options_that_do_not_fit_raise_config_errors(options, match):
    with pytest.raises(ConfigError, match=match), torch.device("meta"):
        build_model(recipe("Market1501/pass_vit_small", *options))
