"""ResNet variants: non-local blocks, IBN, SE and image channels."""

import pytest
import torch
from small_networks import config

from fastamp.modeling import build_backbone

WIDTHS = {"18x": 512, "34x": 512, "50x": 2048, "101x": 2048, "152x": 2048}


def build(depth, *opts):
    return build_backbone(config("build_resnet_backbone", depth, WIDTHS[depth], *opts))


@pytest.mark.integration
@pytest.mark.parametrize(
    "depth, non_local", [("18x", (0, 0)), ("34x", (0, 0)), ("50x", (2, 3)), ("101x", (2, 9)), ("152x", (2, 9))]
)
def test_resnet_depth_sets_number_of_non_local_blocks(depth, non_local, caplog):
    backbone = build(depth, "MODEL.BACKBONE.WITH_NL", "True")
    assert (len(backbone.NL_2), len(backbone.NL_3)) == non_local
    assert len(backbone.NL_1) == len(backbone.NL_4) == 0
    assert ("MODEL.BACKBONE.WITH_NL" in caplog.text) is (non_local == (0, 0))


def test_resnet_non_local_blocks_follow_last_residual_blocks_of_stage():
    backbone, order = build("50x", "MODEL.BACKBONE.WITH_NL", "True"), []
    for name, module in backbone.named_modules():
        if name.startswith(("layer", "NL_")) and name.count(".") == 1:
            module.register_forward_hook(lambda *_, name=name: order.append(name))
    backbone.eval()(torch.zeros(1, 3, 32, 32))
    stages = [order[i:j] for i, j in ((3, 9), (9, 18))]
    assert stages[0] == ["layer2.0", "layer2.1", "layer2.2", "NL_2.0", "layer2.3", "NL_2.1"]
    assert stages[1][3:] == ["layer3.3", "NL_3.0", "layer3.4", "NL_3.1", "layer3.5", "NL_3.2"]


@pytest.mark.integration
@pytest.mark.parametrize("depth", ["18x", "50x"])
@pytest.mark.parametrize("norm", ["BN", "GN"])
def test_all_resnet_parameters_have_gradients_with_ibn_se_and_non_local_blocks(depth, norm):
    options = [f"MODEL.BACKBONE.{key}" for key in ("WITH_IBN", "WITH_SE", "WITH_NL")]
    backbone = build(depth, *(word for key in options for word in (key, "True")), "MODEL.BACKBONE.NORM", norm)
    keys = backbone.state_dict().keys()
    assert {"layer1.0.bn1.IN.weight", "layer3.1.bn1.BN.bias", "layer4.1.se.fc.2.weight"} <= keys
    assert not any("IN." in key for key in keys if key.startswith(("layer4", "bn1")))
    for module in backbone.modules():
        if type(module).__name__ == "NonLocal":
            torch.nn.init.ones_(module.W[1].weight)  # initialized to 0, which blocks gradients
    out = backbone(torch.randn(4, 3, 64, 32))
    assert out.shape == (4, WIDTHS[depth], 4, 2)
    out.square().mean().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("channels", [1, 4])
def test_number_of_image_channels_changes_only_first_resnet_convolution(channels):
    backbone = build("18x", "INPUT.CHANNELS", str(channels)).eval()
    assert backbone.conv1.weight.shape == (64, channels, 7, 7)
    assert backbone(torch.randn(2, channels, 64, 32)).shape == (2, 512, 4, 2)
    assert {name: p.shape for name, p in backbone.named_parameters() if name != "conv1.weight"} == {
        name: p.shape for name, p in build("18x").named_parameters() if name != "conv1.weight"
    }
