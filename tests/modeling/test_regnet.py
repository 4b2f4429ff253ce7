"""RegNet: timm's function, torchvision's where that has the same network, and files of torchvision's and pycls's."""

from collections import Counter

import pytest
import torch
import torchvision

from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.config import get_cfg
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.regnet import DEPTHS, compute_stages
from fastamp.utils.errors import ConfigError, WeightsError

# Figures 13 and 15 of the paper, in part.
PAPER = {
    "200x": ([24, 56, 152, 368], [1, 1, 4, 7], 8),
    "400x": ([32, 64, 160, 384], [1, 2, 7, 12], 16),
    "800x": ([64, 128, 288, 672], [1, 3, 7, 5], 16),
    "6400x": ([168, 392, 784, 1624], [2, 4, 10, 1], 56),
    "32000x": ([336, 672, 1344, 2520], [2, 7, 13, 1], 168),
    "800y": ([64, 128, 320, 768], [1, 3, 8, 2], 16),
    "4000y": ([128, 192, 512, 1088], [2, 6, 12, 2], 64),
    "16000y": ([224, 448, 1232, 3024], [2, 4, 11, 1], 112),
}
# torchvision's names of the same networks.
THEIRS = {
    "800x": "x_800mf", "1600x": "x_1_6gf", "3200x": "x_3_2gf", "8000x": "x_8gf", "16000x": "x_16gf",
    "32000x": "x_32gf", "400y": "y_400mf", "1600y": "y_1_6gf", "3200y": "y_3_2gf", "16000y": "y_16gf",
    "32000y": "y_32gf",
}  # fmt: skip
OTHERS = {"400x": "x_400mf", "800y": "y_800mf", "8000y": "y_8gf"}


def build(depth, *opts):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.NAME", "build_regnet_backbone", "MODEL.BACKBONE.DEPTH", depth])
    width = compute_stages(DEPTHS[depth])[-1].width if depth in DEPTHS else 1
    cfg.merge_from_list(["MODEL.BACKBONE.FEAT_DIM", str(width), *opts])
    return build_backbone(cfg)


def shapes(state):
    return {key: value.shape for key, value in state.items()}


def torchvisions(depth):
    return getattr(torchvision.models, f"regnet_{(THEIRS | OTHERS)[depth]}")()


@pytest.mark.parametrize("depth", PAPER)
def test_stages_are_the_papers(depth):
    widths, blocks, group_width = PAPER[depth]
    stages = compute_stages(DEPTHS[depth])
    assert [stage.width for stage in stages] == widths
    assert [stage.blocks for stage in stages] == blocks
    assert {stage.group_width for stage in stages} == {min(group_width, widths[0])}


def timms_name(depth):
    return f"regnet{depth[-1]}_{int(depth[:-1]) // 100:03}"


def from_timm(state):
    """Return a state dict of timm's under pycls's names."""
    parts = {
        "conv1.conv": "f.a",
        "conv1.bn": "f.a_bn",
        "conv2.conv": "f.b",
        "conv2.bn": "f.b_bn",
        "se.fc1": "f.se.f_ex.0",
    }
    parts |= {"se.fc2": "f.se.f_ex.2", "conv3.conv": "f.c", "conv3.bn": "f.c_bn"}
    parts |= {"downsample.conv": "proj", "downsample.bn": "bn"}
    renamed = {}
    for key, value in state.items():
        module, _, tensor = key.rpartition(".")
        block, part = ".".join(module.split(".")[:2]), ".".join(module.split(".")[2:])
        renamed[f"{block}.{parts[part]}.{tensor}" if part else key] = value
    return renamed


@pytest.mark.parametrize("depth", DEPTHS)
def test_stages_are_timms(depth):
    regnet = pytest.importorskip("timm.models.regnet")
    params = regnet.model_cfgs[timms_name(depth)]
    widths, _, groups = regnet.generate_regnet(params.wa, params.w0, params.wm, params.depth, params.group_size)
    blocks = Counter(widths)
    widths, groups = regnet.adjust_widths_groups_comp(list(blocks), [1.0] * len(blocks), groups)
    stages = [(stage.width, stage.blocks, stage.group_width) for stage in compute_stages(DEPTHS[depth])]
    assert stages == list(zip(widths, blocks.values(), groups, strict=True))


@pytest.mark.parametrize("depth", ["200x", "400x", "3200x", "800y", "4000y", "32000y"])
def test_every_tensor_is_one_of_timms(depth):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        backbone = build(depth)
        theirs = timm.create_model(timms_name(depth), num_classes=0)
    assert shapes(from_timm(theirs.state_dict())) == shapes(backbone.state_dict())


@pytest.mark.parametrize("depth", ["200x", "200y"])
def test_the_function_is_timms(depth):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(timms_name(depth), num_classes=0).eval()
    backbone = build(depth, "MODEL.BACKBONE.LAST_STRIDE", "2").eval()
    state = {key: value.uniform_(0.5, 1.5) if "running" in key else value for key, value in theirs.state_dict().items()}
    backbone.load_state_dict(from_timm(state))
    x = torch.randn(2, 3, 75, 41)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), theirs.forward_features(x))


@pytest.mark.parametrize("depth", [*THEIRS, *OTHERS])
def test_torchvision_has_the_same_network_but_for_three(depth, monkeypatch):
    monkeypatch.setattr(torchvision.models.regnet, "_regnet", lambda params, *_, **__: params)
    params = torchvisions(depth)
    theirs = list(zip(params.widths, params.depths, params.group_widths, strict=True))
    own = [(stage.width, stage.blocks, stage.group_width) for stage in compute_stages(DEPTHS[depth])]
    assert (theirs == own) is (depth in THEIRS)


@pytest.mark.parametrize("depth", ["800x", "400y"])
def test_the_function_is_torchvisions_under_its_weights(depth, tmp_path):
    theirs = torchvisions(depth).eval()
    torch.save(theirs.state_dict(), tmp_path / "regnet.pth")
    file = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "regnet.pth"))
    backbone = build(depth, "MODEL.BACKBONE.LAST_STRIDE", "2", *file).eval()
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), theirs.trunk_output(theirs.stem(x)))


def test_a_file_of_torchvisions_wider_network_is_refused(tmp_path):
    torch.save(torchvisions("400x").state_dict(), tmp_path / "regnet.pth")
    with pytest.raises(WeightsError, match="shape mismatch"):
        build("400x", "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "regnet.pth"))


def test_a_file_of_pycls_with_its_classifier(tmp_path):
    backbone = build("200y")
    state = {key: torch.full_like(value, 2) for key, value in backbone.state_dict().items()}
    torch.save({"model_state": state | {"head.fc.weight": torch.ones(1000, 368)}}, tmp_path / "regnet.pyth")
    load_pretrained_backbone(backbone, path=str(tmp_path / "regnet.pyth"), online=None)
    assert all((value == 2).all() for value in backbone.state_dict().values())


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_weights_are_of_that_network(depth):
    """FastReID's 800x downloads those of 200x."""
    number = int(depth[:-1])
    size = f"{number}MF" if number < 1000 else f"{number / 1000:.1f}GF" if number < 10000 else f"{number // 1000}GF"
    assert DEPTHS[depth].pycls_id.endswith(f"/RegNet{depth[-1].upper()}-{size}")


def test_what_is_downloaded(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "fastamp.modeling.backbones.build_utils.load_pretrained_backbone", lambda model, **kwargs: asked.append(kwargs)
    )
    with torch.device("meta"):
        build("800x", "MODEL.BACKBONE.PRETRAIN", "True")
    url = "https://dl.fbaipublicfiles.com/pycls/dds_baselines/160906036/RegNetX-800MF_dds_8gpu.pyth"
    assert [kwargs["online"].url for kwargs in asked] == [url]


@pytest.mark.parametrize("stride, size", [(1, (4, 2)), (2, (2, 1))])
def test_last_stride(stride, size):
    backbone = build("200x", "MODEL.BACKBONE.LAST_STRIDE", str(stride)).eval()
    with torch.no_grad():
        assert backbone(torch.zeros(1, 3, 64, 32)).shape == (1, 368, *size)


def test_gradients_of_all():
    backbone = build("200y", "INPUT.CHANNELS", "4")
    assert backbone.stem.conv.weight.shape == (32, 4, 3, 3)
    backbone(torch.randn(4, 4, 64, 32)).square().mean().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


def test_unknown_depth():
    with pytest.raises(ConfigError, match=r"DEPTH: '800'; choices: 200x.*'800[xy]'"):
        build("800")


def test_options_that_do_nothing_are_said(caplog):
    with torch.device("meta"):
        build("200x", "MODEL.BACKBONE.WITH_SE", "True")
    assert "WITH_SE does nothing" in caplog.text
