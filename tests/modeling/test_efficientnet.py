"""EfficientNet: comparison with torchvision, and weights files of torchvision and pycls."""

import pytest
import torch
import torchvision

from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.config import get_cfg
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.efficientnet import DEPTHS
from fastamp.utils.errors import ConfigError, WeightsError


def build(depth, *opts):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.NAME", "build_effnet_backbone", "MODEL.BACKBONE.DEPTH", depth])
    width = DEPTHS[depth].head if depth in DEPTHS else 1
    cfg.merge_from_list(["MODEL.BACKBONE.FEAT_DIM", str(width), *opts])
    return build_backbone(cfg)


def torchvision_model(depth):
    return getattr(torchvision.models, f"efficientnet_{depth}")()


@pytest.fixture(scope="module")
def b0():
    torch.manual_seed(1)
    model = torchvision_model("b0")
    for name, value in model.state_dict().items():
        if "running" in name or name.endswith("bias"):
            value.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("depth", DEPTHS)
def test_converted_torchvision_efficientnet_weights_have_matching_names_and_shapes(depth):
    with torch.device("meta"):
        backbone, reference = build(depth), torchvision_model(depth)
    converted = backbone.convert_state_dict(reference.state_dict(), [])
    left = {key: value.shape for key, value in converted.items() if "classifier" not in key}
    assert left == {key: value.shape for key, value in backbone.state_dict().items()}


def test_efficientnet_features_equal_torchvision(tmp_path, b0):
    torch.save(b0.state_dict(), tmp_path / "b0.pth")
    file = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "b0.pth"))
    backbone = build("b0", "MODEL.BACKBONE.LAST_STRIDE", "2", *file).eval()
    for size in ((64, 32), (75, 41)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(backbone(x), b0.features(x))


def test_efficientnet_loads_pycls_weights_with_classifier(tmp_path):
    backbone = build("b0")
    state = {key: torch.full_like(value, 2) for key, value in backbone.state_dict().items()}
    content = {"epoch": 99, "model_state": state | {"head.fc.weight": torch.ones(1000, 1280)}, "cfg": "MODEL: {}"}
    torch.save(content, tmp_path / "EN-B0_dds_8gpu.pyth")
    load_pretrained_backbone(backbone, path=str(tmp_path / "EN-B0_dds_8gpu.pyth"), online=None)
    assert all((value == 2).all() for value in backbone.state_dict().values())


def test_loading_efficientnet_weights_of_another_depth_raises(tmp_path):
    torch.save(torchvision_model("b0").state_dict(), tmp_path / "b0.pth")
    with pytest.raises(WeightsError, match="MODEL.BACKBONE.DEPTH"):
        build("b2", "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "b0.pth"))


@pytest.mark.parametrize("stride, size", [(1, (4, 2)), (2, (2, 1))])
def test_efficientnet_last_stride_1_doubles_feature_map_size(stride, size):
    backbone = build("b0", "MODEL.BACKBONE.LAST_STRIDE", str(stride)).eval()
    with torch.no_grad():
        assert backbone(torch.zeros(1, 3, 64, 32)).shape == (1, 1280, *size)


def test_all_efficientnet_parameters_have_gradients_and_initial_variance_ignores_groups():
    backbone = build("b0", "INPUT.CHANNELS", "1")
    assert backbone.stem.conv.weight.shape == (32, 1, 3, 3)
    # 2 / (3 * 3 * 32): the fan-out ignores the groups of the depthwise convolution.
    assert backbone.s1.b1.dwise.weight.var().item() == pytest.approx(2 / 288, rel=0.3)
    backbone(torch.randn(4, 1, 64, 32)).square().mean().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


def test_efficientnet_depths_have_distinct_pretrained_weights():
    assert len({depth.pycls_id for depth in DEPTHS.values()}) == len(DEPTHS)


def test_error_for_unknown_efficientnet_depth_suggests_nearest_depth():
    with pytest.raises(ConfigError, match=r"DEPTH: .*'B0'; choices: b0, b1.*'b0'"):
        build("B0")


def test_efficientnet_warns_about_ignored_option_with_ibn(caplog):
    with torch.device("meta"):
        build("b0", "MODEL.BACKBONE.WITH_IBN", "True")
    assert "MODEL.BACKBONE.WITH_IBN" in caplog.text
