"""Weights files of pretraining programs: MoCo (LUPerson), DINO (SOLIDER, PASS), and layouts of unknown files."""

import pytest
import torch
import torchvision

from fastamp.checkpoint import Checkpointer
from fastamp.checkpoint.layouts import LAYOUTS, block_counts, nearest_layout, transformer_size
from fastamp.config import read_config
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.utils.errors import WeightsError


def config(*opts):
    return read_config("", [
        "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512",
        "MODEL.HEADS.NUM_CLASSES", "4", "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)", *opts,
    ])  # fmt: skip


def load_backbone(path, *opts):
    opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path), *opts)
    return build_backbone(config(*opts))


def load_whole(path, *opts):
    model = build_model(config(*opts))
    Checkpointer(model).load(path)
    return model.backbone


LOADERS = pytest.mark.parametrize("load", [load_backbone, load_whole], ids=["PRETRAIN_PATH", "MODEL.WEIGHTS"])


def moco_file(state, heads):
    """Return the state dict of a MoCo checkpoint with the given encoder and projection heads."""
    encoder = state | {name: torch.ones(8, 8) for name in heads}
    keys = {f"module.encoder_{kind}.{name}": value for kind in "qk" for name, value in encoder.items()}
    return keys | {"module.queue": torch.ones(8, 16), "module.queue_ptr": torch.zeros(1, dtype=torch.int64)}


@LOADERS
@pytest.mark.parametrize(
    "heads",
    [("fc.0.weight", "fc.2.weight"), ("fc1.0.weight", "fc2.0.weight", "classifier.weight", "embed_fc.weight")],
    ids=["LUPerson", "LUPerson-NL"],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_query_encoder_of_moco_files_is_loaded(suffix, heads, load, tmp_path, caplog):
    state = {name: value for name, value in torchvision.models.resnet18().state_dict().items() if "fc" not in name}
    path, content = tmp_path / f"lup{suffix}", moco_file(state, heads)
    if suffix == ".pth":
        torch.save({"epoch": 1, "arch": "resnet50", "state_dict": content, "optimizer": {}}, path)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file({name: value.clone() for name, value in content.items()}, path)
    backbone = load(path)
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())
    assert "100% of the backbone's" in caplog.text and "dropped" in caplog.text
    assert "tensors that the model lacks" not in caplog.text


@pytest.mark.integration
@LOADERS
def test_teacher_of_dino_checkpoints_of_solider_is_loaded(load, tmp_path):
    opts = ("MODEL.BACKBONE.NAME", "build_solider_backbone", "MODEL.BACKBONE.DEPTH", "tiny",
            "MODEL.BACKBONE.FEAT_DIM", "768")  # fmt: skip
    torch.manual_seed(5)
    state = build_backbone(config(*opts)).state_dict()
    teacher = {f"backbone.{name}": value for name, value in state.items()} | {"head.mlp.0.weight": torch.ones(4, 768)}
    student = {f"module.{name}": torch.zeros_like(value) for name, value in teacher.items()}
    torch.save({"student": student, "teacher": teacher, "optimizer": {}, "epoch": 3}, tmp_path / "dino.pth")
    backbone = load(tmp_path / "dino.pth", *opts)
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())


@pytest.mark.integration
def test_bare_file_of_dinov2_is_loaded_by_model_weights(tmp_path):
    timm = pytest.importorskip("timm")
    reference = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=(56, 28)).state_dict()
    torch.save(reference | {"mask_token": torch.zeros(1, 384)}, tmp_path / "dinov2.pth")
    opts = ("MODEL.BACKBONE.NAME", "timm/vit_small_patch14_dinov2", "INPUT.SIZE_TRAIN", "(56, 28)")
    backbone = load_whole(tmp_path / "dinov2.pth", *opts)
    for name in ("cls_token", "pos_embed", "blocks.11.mlp.fc2.weight", "norm.bias"):
        assert torch.equal(backbone.state_dict()[f"model.{name}"], reference[name])


def test_nearest_layout_of_each_layout_is_itself(subtests):
    for layout in LAYOUTS:
        with subtests.test(layout.title):
            state = {f"some.prefix.{name}": torch.ones(1) for name in layout.names}
            assert nearest_layout(state).startswith(layout.title)


@pytest.mark.integration
def test_refusal_of_a_file_names_the_nearest_layout(tmp_path):
    state = {"stages.0.blocks.0.attn.w_msa.qkv.weight": torch.ones(3, 1)}
    state["patch_embed.projection.weight"] = torch.ones(96, 3, 4, 4)
    torch.save(state, tmp_path / "part.pth")
    for load in (load_backbone, load_whole):
        with pytest.raises(WeightsError, match=r"SOLIDER \(2 of 3.*build_solider_backbone"):
            load(tmp_path / "part.pth")
    with pytest.raises(WeightsError, match="SOLIDER"):
        infer_config(state, "part.pth")


def test_refusal_of_another_network_with_wrong_shapes_names_its_layout(tmp_path):
    state = {"visual.conv3.weight": torch.ones(64, 32, 3, 3), "visual.attnpool.positional_embedding": torch.ones(50, 8)}
    torch.save(state | {"visual.conv1.weight": torch.ones(32, 3, 3, 3)}, tmp_path / "clip.pth")
    opts = ("MODEL.BACKBONE.NAME", "build_clip_vit_backbone", "MODEL.BACKBONE.DEPTH", "tiny")
    with pytest.raises(WeightsError, match="CLIP's ResNet"):
        load_backbone(tmp_path / "clip.pth", *opts, "MODEL.BACKBONE.FEAT_DIM", "128")


def test_nearest_layout_of_unrelated_names_is_empty():
    assert nearest_layout({"a.b": torch.ones(1)}) == "" and transformer_size({"a.b": torch.ones(1)}) == ""


def test_block_counts_of_each_naming():
    names = {
        "timm": ("blocks.0.norm1.weight", "blocks.11.norm1.weight"),
        "microsoft": ("layers.0.blocks.1.norm1.weight", "layers.2.blocks.5.norm1.weight"),
        "torchvision": ("features.1.1.norm1.weight", "backbone.features.5.5.norm1.weight"),
    }
    counts = {kind: block_counts(dict.fromkeys(keys, torch.ones(4))) for kind, keys in names.items()}
    assert counts == {"timm": [12], "microsoft": [2, 6], "torchvision": [2, 6]}
