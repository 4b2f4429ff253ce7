"""tools/import_checkpoint.py: weights of other projects and older versions give the same features."""

import argparse
import gzip
import json
from pathlib import Path

import import_checkpoint
import numpy as np
import pytest
import torch
import torchvision

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.config import CfgNode, read_config
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.utils.errors import WeightsError

pytestmark = pytest.mark.integration

IMAGES = torch.randint(256, (3, 3, 64, 32), dtype=torch.uint8)
RESNET18 = ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.HEADS.WITH_BNNECK", "True")
OSNET = (
    "MODEL.BACKBONE.NAME", "build_osnet_backbone", "MODEL.BACKBONE.DEPTH", "x0_25", "MODEL.BACKBONE.FEAT_DIM", "128",
)  # fmt: skip
REPVGG = (
    "MODEL.BACKBONE.NAME",
    "build_repvgg_backbone",
    "MODEL.BACKBONE.DEPTH",
    "A0",
    "MODEL.BACKBONE.FEAT_DIM",
    "1280",
)


def model(*opts, seed=0):
    cfg = read_config("", ["MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "5", *opts])
    torch.manual_seed(seed)
    made = build_model(cfg)
    for name, value in made.state_dict().items():  # no buffer or bias keeps its initial value
        if value.is_floating_point() and value.dim() == 1:
            value.copy_(torch.rand_like(value) / 2 + (0.5 if "var" in name or "weight" in name else 0))
    return made.eval()


def features(made):
    with torch.no_grad():
        return made({"images": IMAGES})


def renamed(state, names):
    """Return ``state`` with its tensors renamed; ``names`` maps new names to old names."""
    for new, old in names.items():
        state = {name.replace(new, old): value for name, value in state.items()}
    return state


def run(tmp_path, content, *arguments):
    torch.save(content, tmp_path / "in.pth")
    return import_checkpoint.cli([str(tmp_path / "in.pth"), str(tmp_path / "out.pth"), *arguments])


AGES = {
    "v0.1.1": {"heads.bottleneck.0": "heads.bnneck", "heads.weight": "heads.classifier.weight"},
    "v1.0.0": {"heads.weight": "heads.classifier.weight"},
    "2021-03": {},
}


@pytest.mark.parametrize("age", AGES)
def test_import_of_weights_from_each_fastreid_version_preserves_features(tmp_path, capsys, age):
    original = model(*RESNET18)
    state = renamed(original.state_dict(), AGES[age])
    if age != "2021-03":
        state |= {"pixel_mean": original.pixel_mean.clone(), "pixel_std": original.pixel_std.clone()}
    state = {f"module.{name}": value for name, value in state.items()}
    assert run(tmp_path, {"model": state, "epoch": np.float64(3)}) == 0
    report = capsys.readouterr().out
    assert "MODEL.BACKBONE.NAME build_resnet_backbone MODEL.BACKBONE.DEPTH 18x" in report
    assert "(100%) of the model's tensors, 100% of the backbone's" in report
    assert "missing  0 (0%)" in report
    assert ("STEM_POOL to padded" in report) == (age == "v0.1.1")
    assert "trained with" not in report
    other = model(*RESNET18, seed=1)
    extra = Checkpointer(other).load(tmp_path / "out.pth")
    assert torch.equal(features(other), features(original))
    assert torch.equal(other.heads.weight, original.heads.weight)
    assert "NUM_CLASSES: 5" in extra["config"]


def test_import_rejects_file_with_more_tensors_than_any_backbone(tmp_path, input_error, monkeypatch):
    monkeypatch.setattr("fastamp.modeling.infer_config._candidates", lambda *_: pytest.fail("it was searched"))
    extra = {f"backbone.extra.{number}": torch.zeros(1) for number in range(6000)}
    assert "6100" in input_error(run, tmp_path, model(*RESNET18).state_dict() | extra)


def test_import_rejects_circular_link_as_source_but_replaces_it_as_target(tmp_path, input_error):
    for name, target in (("a.pth", "b.pth"), ("b.pth", "a.pth")):
        (tmp_path / name).symlink_to(target)
    assert "link to b.pth" in input_error(import_checkpoint.cli, [str(tmp_path / "a.pth"), str(tmp_path / "out.pth")])
    # A circular link as target is replaced by the file.
    assert run(tmp_path, model(*RESNET18).state_dict()) == 0
    assert import_checkpoint.cli([str(tmp_path / "in.pth"), str(tmp_path / "a.pth")]) == 0
    assert not (tmp_path / "a.pth").is_symlink()


def below(prefix, state):
    return {prefix + name: value for name, value in state.items()}


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(0)
    state = torchvision.models.resnet18().state_dict()
    return {name: value for name, value in state.items() if not name.startswith("fc.")}


def foreign_file(kind, backbone):
    """Return a file in the format of another project, and the prefixes of its backbones."""
    other = {name: value + 1 for name, value in backbone.items()}
    head = {"head.mlp.0.weight": torch.zeros(4, 512)}
    files = {
        "DINO": (
            {
                "student": below("module.", below("backbone.", other) | head),
                "teacher": below("backbone.", backbone) | head,
                "epoch": 3,
                "args": argparse.Namespace(arch="resnet18", lr=0.1),
            },
            ["teacher.backbone.", "student.module.backbone."],
        ),
        "MoCo v2": (
            {
                "epoch": 3,
                "arch": "resnet18",
                "state_dict": below("module.encoder_q.", backbone | {"fc.0.weight": torch.zeros(512, 512)})
                | below("module.encoder_k.", other)
                | {"module.queue": torch.zeros(128, 64)},
            },
            ["state_dict.module.encoder_q.", "state_dict.module.encoder_k."],
        ),
        "MoCo v3": (
            {"state_dict": below("module.base_encoder.", backbone) | below("module.momentum_encoder.", other)},
            ["state_dict.module.base_encoder.", "state_dict.module.momentum_encoder."],
        ),
        "Lightning": (
            {"state_dict": below("net.", backbone) | {"loss.w": torch.ones(1)}, "pytorch-lightning_version": "2.1"},
            ["state_dict.net."],
        ),
        "CLIP": (below("visual.", backbone) | {"logit_scale": torch.tensor(1.0)}, ["visual."]),
    }
    return files[kind]


@pytest.mark.parametrize("kind", ["DINO", "MoCo v2", "MoCo v3", "CLIP"])
def test_import_suggests_and_accepts_prefixes_of_backbones_in_foreign_files(
    tmp_path, input_error, capsys, resnet18, kind
):
    content, prefixes = foreign_file(kind, resnet18)
    err = input_error(run, tmp_path, content)
    assert [prefix for prefix in prefixes if f"--prefix {prefix}   (resnet)" in err] == prefixes, err
    assert run(tmp_path, content, "--prefix", prefixes[0], "MODEL.HEADS.POOL_LAYER", "GlobalAvgPool") == 0
    assert "100% of the backbone's" in capsys.readouterr().out
    written = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    assert all(torch.equal(written[f"backbone.{name}"], value) for name, value in resnet18.items())


@pytest.mark.parametrize("prefix", [(), ("--prefix", "state_dict.net.")], ids=["stripped", "given"])
def test_import_of_a_lightning_checkpoint(tmp_path, resnet18, prefix):
    content, _ = foreign_file("Lightning", resnet18)
    assert run(tmp_path, content, *prefix) == 0
    written = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    assert all(torch.equal(written[f"backbone.{name}"], value) for name, value in resnet18.items())


@pytest.mark.parametrize("entry", ["model_ema", "model"])
def test_import_prefers_the_average_of_the_weights(tmp_path, resnet18, entry):
    content = {"model": {name: value + 1 for name, value in resnet18.items()}, "model_ema": resnet18}
    assert run(tmp_path, content, *(("--prefix", entry) if entry == "model" else ())) == 0
    written = torch.load(tmp_path / "out.pth", weights_only=True)["model"]
    assert all(torch.equal(written[f"backbone.{name}"], content[entry][name]) for name in resnet18)


def test_import_suggests_no_prefix_for_file_with_fastamp_names(tmp_path, input_error):
    state = model(*RESNET18).state_dict()
    assert "--prefix" not in input_error(run, tmp_path, state, "--config-file", "Market1501/sbs_R50-ibn")


def test_import_error_for_unknown_prefix_lists_prefixes_in_file(tmp_path, input_error, resnet18):
    content, _ = foreign_file("DINO", resnet18)
    err = input_error(run, tmp_path, content, "--prefix", "teacher.backbon")
    assert "Did you mean 'teacher.backbone.'?" in err and "found: student, teacher" in err


def test_import_of_clip_weights_suggests_prefix_of_image_encoder(tmp_path, input_error):
    state = {"visual.transformer.resblocks.0.attn.in_proj_weight": torch.zeros(3, 1), "logit_scale": torch.zeros(())}
    assert "--prefix visual.   (CLIP's image encoder)" in (err := input_error(run, tmp_path, state)) and "timm" in err


def test_import_of_dino_vit_weights_suggests_and_accepts_teacher_prefix(tmp_path, input_error, capsys):
    cfg = read_config("", [
        "MODEL.BACKBONE.NAME", "build_vit_backbone", "MODEL.BACKBONE.DEPTH", "deit_small", "MODEL.BACKBONE.FEAT_DIM",
        "384", "INPUT.SIZE_TEST", "(224, 224)",
    ])  # fmt: skip
    state = build_backbone(cfg).state_dict()
    content = {"teacher": below("backbone.", state), "student": below("module.backbone.", state)}
    assert "--prefix teacher.backbone.   (vit)" in input_error(run, tmp_path, content)
    assert run(tmp_path, content, "--prefix", "teacher.backbone") == 0
    assert "100% of the backbone's" in capsys.readouterr().out


def test_import_reports_different_pixel_normalization(tmp_path, capsys):
    state = model(*RESNET18).state_dict() | {"pixel_mean": torch.full((1, 3, 1, 1), 127.5)}
    assert run(tmp_path, state) == 0
    assert "note: the weights were trained with MODEL.PIXEL_MEAN [127.5, 127.5, 127.5]" in capsys.readouterr().out


def test_import_rejects_fastreid_reduction_head(tmp_path, input_error):
    state = model(*RESNET18, "MODEL.HEADS.EMBEDDING_DIM", "8").state_dict()
    state |= {f"heads.bnneck.{name}": torch.ones(8) for name in ("weight", "bias", "running_mean", "running_var")}
    assert "ReductionHead" in input_error(run, tmp_path, state)
    assert not (tmp_path / "out.pth").exists()


def test_import_of_torchreid_osnet_with_fc_layer_preserves_features(tmp_path, capsys):
    opts = (*OSNET, "MODEL.HEADS.NAME", "FCHead", "MODEL.HEADS.EMBEDDING_DIM", "16")
    original = model(*opts)
    state = renamed(original.state_dict(), AGES["v1.0.0"])
    state = {name.removeprefix("backbone.").removeprefix("heads."): value for name, value in state.items()}
    state["classifier.bias"] = torch.zeros(5)
    assert run(tmp_path, {"state_dict": state}) == 0
    out = capsys.readouterr().out
    assert "dropped  1 (0%) of the file's tensors (heads.classifier.bias)" in out and "note: test images" not in out
    config = torch.load(tmp_path / "out.pth", weights_only=True)["config"]
    assert "INTERPOLATION: bilinear" in config and "INTERPOLATION_TEST: same" in config
    other = model(*opts, seed=1)
    Checkpointer(other).load(tmp_path / "out.pth")
    assert torch.equal(features(other), features(original))
    # The layer is that of torchreid: linear, batch norm and ReLU after average pooling.
    with torch.no_grad():
        pooled = original.backbone(original.preprocess(IMAGES)).mean((2, 3))
        expected = torch.relu(original.heads.fc[1](original.heads.fc[0](pooled)))
    torch.testing.assert_close(features(original), expected)
    # Another head computes another function, which is reported.
    assert run(tmp_path, state, "MODEL.HEADS.NAME", "EmbeddingHead", "MODEL.HEADS.EMBEDDING_DIM", "0") == 0
    assert "set MODEL.HEADS.NAME to FCHead" in capsys.readouterr().out
    # An explicit interpolation is kept, and the difference is reported.
    assert run(tmp_path, state, "INPUT.INTERPOLATION", "bicubic") == 0
    assert "bicubic" in capsys.readouterr().out


def test_import_of_repvgg_in_deploy_form_preserves_features(tmp_path):
    original = model(*REPVGG)
    assert run(tmp_path, original.state_dict(), "MODEL.BACKBONE.DEPLOY", "True") == 0
    deployed = model(*REPVGG, "MODEL.BACKBONE.DEPLOY", "True", seed=1)
    Checkpointer(deployed).load(tmp_path / "out.pth")
    expected = features(original)
    torch.testing.assert_close(features(deployed), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_import_rejects_weights_with_matching_fraction_below_minimum(tmp_path, input_error):
    (tmp_path / "recipe.yml").write_text("MODEL: {BACKBONE: {DEPTH: 18x, FEAT_DIM: 512}, HEADS: {WITH_BNNECK: True}}")
    state = {name: value for name, value in model(*RESNET18).state_dict().items() if "layer4" not in name}
    recipe = ("--config-file", str(tmp_path / "recipe.yml"))
    assert "lower MODEL.WEIGHTS_MIN_MATCH" in input_error(run, tmp_path, state, *recipe)
    assert run(tmp_path, state, *recipe, "MODEL.WEIGHTS_MIN_MATCH", "0.5") == 0
    assert torch.load(tmp_path / "out.pth", weights_only=True)["model"]["heads.weight"].shape == (5, 512)


def test_import_with_distiller_config_does_not_need_teacher_files(tmp_path):
    kd = ("MODEL.META_ARCHITECTURE", "Distiller", "KD.MODEL_CONFIG", "gone.yml", "KD.MODEL_WEIGHTS", "gone.pth")
    assert run(tmp_path, model(*RESNET18).state_dict(), *kd) == 0
    assert "META_ARCHITECTURE: Baseline" in torch.load(tmp_path / "out.pth", weights_only=True)["config"]


def test_import_exits_with_2_for_invalid_paths_or_unknown_model(tmp_path, input_error):
    torch.save({"a": torch.ones(3)}, tmp_path / "in.pth")
    for arguments, message in (
        (("in.pth", "in.pth"), "in.pth"),
        (("in.pth", "out"), ".pth"),
        (("gone.pth", "out.pth"), "gone.pth"),
        (("in.pth", "out.pth"), "--config-file"),
    ):
        assert message in input_error(import_checkpoint.cli, [str(tmp_path / argument) for argument in arguments])


def test_import_rejects_non_finite_weights_and_writes_no_file(tmp_path, input_error):
    state = model(*RESNET18).state_dict()
    state["backbone.conv1.weight"][0] = float("nan")
    assert "non-finite values (backbone.conv1.weight)" in input_error(run, tmp_path, state)
    assert not (tmp_path / "out.pth").exists()


def test_import_does_not_mistake_torchvision_classifier_for_fc_head(tmp_path, capsys):
    state = torchvision.models.resnet18().state_dict()
    assert run(tmp_path, state) == 0
    report = capsys.readouterr().out
    assert "missing  0 (0%)" in report and "STEM_POOL to padded" in report and "FCHead" not in report


def test_import_rejects_key_without_value(tmp_path, input_error):
    assert "got ['MODEL.DEVICE']" in input_error(run, tmp_path, {}, "MODEL.DEVICE")


REFERENCE = Path(__file__).parents[1] / "reference"
KEPT = {
    "DukeMTMC/mgn_R50-ibn.yml": {
        "MODEL.META_ARCHITECTURE": "MGN", "MODEL.BACKBONE.DEPTH": "50x", "MODEL.BACKBONE.WITH_IBN": "True",
        "MODEL.HEADS.EMBEDDING_DIM": "256", "MODEL.HEADS.POOL_LAYER": "GeneralizedMeanPoolingP",
    },
    "vit_transreid_stride": {
        "MODEL.BACKBONE.NAME": "build_vit_backbone", "MODEL.HEADS.NAME": "JPMHead", "MODEL.HEADS.EVAL_FEAT": "before",
        "MODEL.BACKBONE.STRIDE_SIZE": "(12, 12)", "MODEL.BACKBONE.SIE_CAMERAS": "6", "MODEL.HEADS.JPM.PARTS": "4",
    },
    "DukeMTMC/AGW_R50.yml": {"MODEL.BACKBONE.DEPTH": "50x", "MODEL.BACKBONE.WITH_NL": "True"},
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_infer_config_finds_keys_of_fastreid_and_transreid_weights(name):
    models = {}
    for file in ("fastreid_models.json.gz", "transreid_models.json.gz"):
        models |= json.loads(gzip.decompress((REFERENCE / file).read_bytes()))
    state = {key: torch.zeros(shape) for key, shape in models[name]["state_dict"].items()}
    keys = infer_config(state, "x")
    assert keys.items() >= KEPT[name].items()
    assert keys["MODEL.HEADS.NUM_CLASSES"] == "751"


def test_infer_config_raises_for_weights_of_unknown_model(tmp_path):
    with pytest.raises(WeightsError, match="x.pth"):
        infer_config({"encoder.0.weight": torch.zeros(3, 3)}, "x.pth")


def test_infer_config_ignores_scalar_classifier_weight():
    state = model(*RESNET18).state_dict() | {"heads.weight": torch.tensor(1.0)}
    assert "MODEL.HEADS.NUM_CLASSES" not in infer_config(state, "x.pth")


def test_import_recognizes_the_network_of_a_project(tmp_path):
    cfg = read_config("FastFace/demo", ["MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "4"])
    torch.save(build_model(cfg).state_dict(), tmp_path / "in.pth")
    paths = [str(tmp_path / "in.pth"), str(tmp_path / "out.pth")]
    size = ["INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)"]
    assert import_checkpoint.cli([*paths, "PROJECTS=[FastFace]", *size]) == 0
    written = CfgNode.load_cfg(torch.load(tmp_path / "out.pth", weights_only=True)["config"])
    assert written.MODEL.BACKBONE.NAME == cfg.MODEL.BACKBONE.NAME
    assert written.MODEL.BACKBONE.FEAT_DIM == cfg.MODEL.BACKBONE.FEAT_DIM
    assert written.MODEL.HEADS.POOL_LAYER == cfg.MODEL.HEADS.POOL_LAYER


@pytest.mark.parametrize(
    "state, hint",
    [
        (
            {
                "vision_model.embeddings.class_embedding": torch.zeros(8),
                "vision_model.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(8, 8),
            },
            "Hugging Face",
        ),
        (
            {
                "visual.class_embedding": torch.zeros(8),
                "visual.conv1.weight": torch.zeros(8, 3, 14, 14),
                "visual.transformer.resblocks.0.attn.in_proj_weight": torch.zeros(24, 8),
            },
            "ViT-L/14",
        ),
    ],
)
def test_import_of_a_clip_that_does_not_load_names_its_layout(state, hint, tmp_path, input_error):
    assert hint in input_error(run, tmp_path, state)
