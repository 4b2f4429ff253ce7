"""RegNet: comparison with timm and torchvision, and weights files of torchvision and pycls."""

from collections import Counter

import pytest
import torch
import torchvision
from small_networks import config

from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.regnet import DEPTHS, compute_stages
from fastamp.utils.errors import WeightsError

# From figures 13 and 15 of the paper.
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
# Names of the same networks in torchvision.
TORCHVISION = {
    "800x": "x_800mf", "1600x": "x_1_6gf", "3200x": "x_3_2gf", "8000x": "x_8gf", "16000x": "x_16gf",
    "32000x": "x_32gf", "400y": "y_400mf", "1600y": "y_1_6gf", "3200y": "y_3_2gf", "16000y": "y_16gf",
    "32000y": "y_32gf",
}  # fmt: skip
# Names of wider networks in torchvision.
TORCHVISION_WIDER = {"400x": "x_400mf", "800y": "y_800mf", "8000y": "y_8gf"}


def build(depth, *opts):
    return build_backbone(config("build_regnet_backbone", depth, compute_stages(DEPTHS[depth])[-1].width, *opts))


def shapes(state):
    return {key: value.shape for key, value in state.items()}


def torchvision_model(depth):
    return getattr(torchvision.models, f"regnet_{(TORCHVISION | TORCHVISION_WIDER)[depth]}")()


@pytest.mark.parametrize("depth", PAPER)
def test_regnet_stages_equal_paper(depth):
    widths, blocks, group_width = PAPER[depth]
    stages = compute_stages(DEPTHS[depth])
    assert [stage.width for stage in stages] == widths
    assert [stage.blocks for stage in stages] == blocks
    assert {stage.group_width for stage in stages} == {min(group_width, widths[0])}


def timm_name(depth):
    return f"regnet{depth[-1]}_{int(depth[:-1]) // 100:03}"


def from_timm(state):
    """Rename the parameters in a timm state dict to pycls's names."""
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


def test_regnet_stages_equal_timm(subtests):
    for depth in DEPTHS:
        with subtests.test(depth=depth):
            regnet = pytest.importorskip("timm.models.regnet")
            params = regnet.model_cfgs[timm_name(depth)]
            widths, _, groups = regnet.generate_regnet(params.wa, params.w0, params.wm, params.depth, params.group_size)
            blocks = Counter(widths)
            widths, groups = regnet.adjust_widths_groups_comp(list(blocks), [1.0] * len(blocks), groups)
            stages = [(stage.width, stage.blocks, stage.group_width) for stage in compute_stages(DEPTHS[depth])]
            assert stages == list(zip(widths, blocks.values(), groups, strict=True))


@pytest.mark.parametrize("depth", ["200x", "400x", "3200x", "800y", "4000y", "32000y"])
def test_renamed_timm_regnet_parameters_have_matching_names_and_shapes(depth):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        backbone = build(depth)
        reference = timm.create_model(timm_name(depth), num_classes=0)
    assert shapes(from_timm(reference.state_dict())) == shapes(backbone.state_dict())


@pytest.mark.parametrize("depth", ["200x", "200y"])
def test_regnet_features_equal_timm(depth):
    timm = pytest.importorskip("timm")
    reference = timm.create_model(timm_name(depth), num_classes=0).eval()
    backbone = build(depth, "MODEL.BACKBONE.LAST_STRIDE", "2").eval()
    state = {
        key: value.uniform_(0.5, 1.5) if "running" in key else value for key, value in reference.state_dict().items()
    }
    backbone.load_state_dict(from_timm(state))
    x = torch.randn(2, 3, 75, 41)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), reference.forward_features(x))


@pytest.mark.parametrize("depth", [*TORCHVISION, *TORCHVISION_WIDER])
def test_regnet_stages_equal_torchvision_except_for_three_wider_networks(depth, monkeypatch):
    monkeypatch.setattr(torchvision.models.regnet, "_regnet", lambda params, *_, **__: params)
    params = torchvision_model(depth)
    reference = list(zip(params.widths, params.depths, params.group_widths, strict=True))
    stages = [(stage.width, stage.blocks, stage.group_width) for stage in compute_stages(DEPTHS[depth])]
    assert (reference == stages) is (depth in TORCHVISION)


def test_loading_weights_of_wider_torchvision_regnet_raises(tmp_path):
    torch.save(torchvision_model("400x").state_dict(), tmp_path / "regnet.pth")
    with pytest.raises(WeightsError, match="MODEL.BACKBONE.DEPTH"):
        build("400x", "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "regnet.pth"))


@pytest.mark.parametrize("depth", DEPTHS)
def test_regnet_pretrained_weights_match_depth(depth):
    """FastReID has a bug here: for 800x, it downloads the weights of 200x."""
    number = int(depth[:-1])
    size = f"{number}MF" if number < 1000 else f"{number / 1000:.1f}GF" if number < 10000 else f"{number // 1000}GF"
    assert DEPTHS[depth].pycls_id.endswith(f"/RegNet{depth[-1].upper()}-{size}")


def test_pretrain_downloads_regnet_weights_from_pycls_url(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "fastamp.modeling.backbones.build_utils.load_pretrained_backbone", lambda model, **kwargs: calls.append(kwargs)
    )
    with torch.device("meta"):
        build("800x", "MODEL.BACKBONE.PRETRAIN", "True")
    url = "https://dl.fbaipublicfiles.com/pycls/dds_baselines/160906036/RegNetX-800MF_dds_8gpu.pyth"
    assert [kwargs["online"].url for kwargs in calls] == [url]
