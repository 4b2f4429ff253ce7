"""Swin: comparison with torchvision, and weights files of torchvision, the authors and timm."""

import dataclasses

import pytest
import torch
import torchvision
from small_networks import config
from torchvision.ops import StochasticDepth

from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.config import read_config
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones import vit
from fastamp.modeling.backbones.swin import DEPTHS, Depth, Swin

WIDTHS = {"tiny": 768, "small": 768, "base": 1024}
SMALL = Depth(12, (2, 2, 2, 2), (1, 2, 3, 4), "")


def build(depth, *opts):
    return build_backbone(config("build_swin_backbone", depth, WIDTHS[depth], *opts))


def timm_swin(size=(64, 32)):
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    model = timm.models.swin_transformer.SwinTransformer(
        img_size=size, embed_dim=12, depths=(2, 2, 2, 2), num_heads=(1, 2, 3, 4), num_classes=5,
        strict_img_size=False, always_partition=True,
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("depth", DEPTHS)
def test_swin_parameter_names_and_shapes_equal_torchvision(depth):
    with torch.device("meta"):
        backbone, reference = build(depth), getattr(torchvision.models, DEPTHS[depth].weights)()
    expected = {key: value.shape for key, value in reference.state_dict().items() if "index" not in key}
    shapes = {key: value.shape for key, value in backbone.state_dict().items()}
    assert shapes == {key: shape for key, shape in expected.items() if not key.startswith("head.")}


@pytest.mark.parametrize("origin", ["timm", "authors"])
def test_swin_with_timm_or_authors_weights_computes_same_features(origin):
    # The last feature map is 14 x 14: for maps up to the window size, timm reduces the window.
    reference = timm_swin((448, 448))
    state = dict(reference.state_dict())
    if origin == "authors":
        for stage in (1, 2, 3):
            for key in [key for key in state if key.startswith(f"layers.{stage}.downsample.")]:
                state[key.replace(f"layers.{stage}.", f"layers.{stage - 1}.")] = state.pop(key)
        state["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 49, 49)
        state["layers.0.blocks.1.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.int64)
    backbone = Swin(SMALL).eval()
    report = load_model_state(backbone, state, source=origin, backbone_prefix="")
    assert report.missing == []
    assert {key.split(".")[0] for key in report.dropped} == {"head"}
    x = torch.randn(1, 3, 448, 448)
    with torch.no_grad():
        expected = reference.forward_features(x).permute(0, 3, 1, 2)
        torch.testing.assert_close(backbone(x), expected, rtol=1e-4, atol=1e-4)


def test_swin_state_dict_can_be_loaded_completely():
    backbone, other = Swin(SMALL), Swin(SMALL)
    report = load_model_state(other, backbone.state_dict(), source="own", backbone_prefix="")
    assert report.missing == report.dropped == report.renamed == []
    x = torch.randn(2, 3, 64, 32)
    torch.testing.assert_close(other.eval()(x), backbone.eval()(x))


@pytest.mark.parametrize("size, expected", [((256, 128), (8, 4)), ((75, 41), (3, 2)), ((64, 32), (2, 1))])
def test_swin_accepts_any_image_size(size, expected):
    with torch.no_grad():
        assert Swin(SMALL).eval()(torch.randn(2, 3, *size)).shape == (2, 96, *expected)


def test_config_sets_swin_dropout_and_image_channels():
    options = ["MODEL.BACKBONE.DROP_PATH_RATIO", "0.3", "MODEL.BACKBONE.ATT_DROP_RATE", "0.2", "INPUT.CHANNELS", "4"]
    backbone = build("tiny", *options, "MODEL.BACKBONE.DROP_RATIO", "0.1")
    ratios = [module.p for module in backbone.modules() if isinstance(module, StochasticDepth)]
    assert ratios == pytest.approx([0.3 * block / 11 for block in range(12)])
    attention = backbone.features[1][0].attn
    assert (attention.attention_dropout, attention.dropout) == (0.2, 0.1)
    assert backbone.features[0][0].weight.shape == (96, 4, 4, 4)


def test_loading_rgb_weights_into_swin_sets_fourth_channel_to_zero(tmp_path):
    torch.save(Swin(SMALL).state_dict(), tmp_path / "swin.pth")
    backbone = Swin(SMALL, in_channels=4)
    load_pretrained_backbone(backbone, path=str(tmp_path / "swin.pth"), online=None)
    assert not backbone.features[0][0].weight[:, 3].any()


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["build_swin_backbone", "build_solider_backbone", "build_vit_backbone"])
def test_checkpointing_changes_neither_features_nor_gradients(name, amp, monkeypatch):
    for depths, blocks in ((DEPTHS, (1, 2, 1, 1)), (vit.DEPTHS, 2)):
        for depth, values in depths.items():
            monkeypatch.setitem(depths, depth, dataclasses.replace(values, blocks=blocks))
    depth, width = ("deit_small", "384") if "vit" in name else ("tiny", "768")
    images, results = torch.randn(2, 3, 64, 32), []
    for checkpointing in ("False", "True"):
        torch.manual_seed(0)
        cfg = read_config("", [
            "MODEL.BACKBONE.NAME", name, "MODEL.BACKBONE.DEPTH", depth, "MODEL.BACKBONE.FEAT_DIM", width,
            "MODEL.BACKBONE.DROP_PATH_RATIO", "0.5", "MODEL.BACKBONE.CHECKPOINTING", checkpointing,
            "INPUT.SIZE_TRAIN", "(64, 32)",
        ])  # fmt: skip
        backbone = build_backbone(cfg).train()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            features = backbone(images)
        features.float().square().sum().backward()
        results.append([features.detach(), *(p.grad for p in backbone.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
