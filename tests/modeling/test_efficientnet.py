"""EfficientNet: comparison with torchvision, and weights files of torchvision and pycls."""

import pytest
import torch
import torchvision
from small_networks import config

from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.efficientnet import DEPTHS
from fastamp.utils.errors import WeightsError


def build(depth, *opts):
    return build_backbone(config("build_effnet_backbone", depth, DEPTHS[depth].head, *opts))


def torchvision_model(depth):
    return getattr(torchvision.models, f"efficientnet_{depth}")()


@pytest.mark.parametrize("depth", DEPTHS)
def test_converted_torchvision_efficientnet_weights_have_matching_names_and_shapes(depth):
    with torch.device("meta"):
        backbone, reference = build(depth), torchvision_model(depth)
    converted = backbone.convert_state_dict(reference.state_dict(), [])
    left = {key: value.shape for key, value in converted.items() if "classifier" not in key}
    assert left == {key: value.shape for key, value in backbone.state_dict().items()}


def test_loading_efficientnet_weights_of_another_depth_raises(tmp_path):
    torch.save(torchvision_model("b0").state_dict(), tmp_path / "b0.pth")
    with pytest.raises(WeightsError, match="MODEL.BACKBONE.DEPTH"):
        build("b2", "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "b0.pth"))


def test_initial_variance_of_efficientnet_ignores_groups():
    # 2 / (3 * 3 * 32): the fan-out ignores the groups of the depthwise convolution.
    assert build("b0").s1.b1.dwise.weight.var().item() == pytest.approx(2 / 288, rel=0.3)


def test_efficientnet_depths_have_distinct_pretrained_weights():
    assert len({depth.pycls_id for depth in DEPTHS.values()}) == len(DEPTHS)
