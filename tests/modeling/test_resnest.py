"""ResNeSt: comparison with timm, and FastReID's dilated last stage."""

import pytest
import timm
import torch
from small_networks import config
from timm.models.resnest import ResNestBottleneck
from timm.models.resnet import ResNet as TimmResNet

from fastamp.checkpoint.pretrained import Download, load_pretrained_backbone
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.resnest import DEPTHS, Depth, ResNeSt, SplitAttention
from fastamp.utils.errors import WeightsError

TIMM_NAMES = {"50x": "resnest50d", "101x": "resnest101e", "200x": "resnest200e", "269x": "resnest269e"}
BLOCKS = (1, 2, 1, 3)
NO_FILE = Download("")


def build_meta(depth, *opts):
    with torch.device("meta"):
        return build_backbone(config("build_resnest_backbone", depth, 2048, *opts))


def randomize(module):
    """Randomize the batch norms."""
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            for value, low, high in ((norm.weight, 0.5, 1.5), (norm.bias, -0.2, 0.2)):
                torch.nn.init.uniform_(value, low, high)
            norm.running_mean.uniform_(-0.2, 0.2)
            norm.running_var.uniform_(0.5, 1.5)


@pytest.fixture(scope="module")
def timm_model():
    """Small timm ResNeSt with random weights."""
    torch.manual_seed(0)
    model = TimmResNet(
        ResNestBottleneck,
        BLOCKS,
        num_classes=7,
        stem_type="deep",
        stem_width=16,
        avg_down=True,
        base_width=64,
        cardinality=1,
        block_args={"radix": 2, "avd": True, "avd_first": False},
    )
    randomize(model)
    return model.eval()


@pytest.mark.integration
@pytest.mark.parametrize("depth", DEPTHS)
def test_resnest_parameter_names_and_shapes_equal_timm(depth):
    with torch.device("meta"):
        reference = timm.create_model(TIMM_NAMES[depth], num_classes=0)
    expected = {name: tuple(value.shape) for name, value in reference.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in build_meta(depth).state_dict().items()} == expected


@pytest.mark.integration
@pytest.mark.parametrize("size", [(64, 32), (75, 45)])
def test_resnest_features_equal_timm(timm_model, tmp_path, size):
    torch.save(timm_model.state_dict(), tmp_path / "resnest.pth")
    backbone = ResNeSt(Depth(BLOCKS, 16, NO_FILE), last_stride=2).eval()
    load_pretrained_backbone(backbone, path=str(tmp_path / "resnest.pth"), online=None)
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(backbone(images), timm_model.forward_features(images), rtol=1e-4, atol=1e-4)


def test_split_attention_is_weighted_sum_of_splits():
    layer, x = SplitAttention(8, dilation=1, norm="BN"), torch.randn(3, 8, 5, 4)
    randomize(layer)
    layer.eval()
    first, second = torch.relu(layer.bn0(layer.conv(x))).chunk(2, dim=1)
    pooled = (first + second).mean((2, 3), keepdim=True)
    a, b = layer.fc2(torch.relu(layer.bn1(layer.fc1(pooled)))).chunk(2, dim=1)
    weight = torch.sigmoid(a - b)
    torch.testing.assert_close(layer(x), weight * first + (1 - weight) * second)
    assert layer.fc1.out_channels == 32


def test_resnest_last_stride_1_dilates_last_stage_except_first_block():
    backbone = build_meta("50x")
    assert [block.conv2.conv.dilation[0] for block in backbone.layer4] == [1, 2, 2]
    assert {block.conv2.conv.dilation[0] for block in backbone.layer3} == {1}
    # The first block of stages 2 to 4 has average pooling, even with stride 1.
    pools = [isinstance(block.avd_layer, torch.nn.AvgPool2d) for block in (backbone.layer1[0], *backbone.layer4)]
    assert pools == [False, True, False, False]
    assert backbone(torch.empty(2, 3, 64, 32, device="meta")).shape == (2, 2048, 4, 2)
    backbone = build_meta("50x", "MODEL.BACKBONE.LAST_STRIDE", "2")
    assert {block.conv2.conv.dilation[0] for block in backbone.layer4} == {1}
    assert backbone(torch.empty(2, 3, 64, 32, device="meta")).shape == (2, 2048, 2, 1)


def test_resnest_bfloat16_features_are_close_to_float32():
    backbone, images = ResNeSt(Depth((1, 1, 1, 1), 32, NO_FILE)).eval(), torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        expected = backbone(images)
        with torch.autocast("cpu", torch.bfloat16):
            out = backbone(images)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 0.03


def test_loading_weights_of_another_network_into_resnest_raises(tmp_path):
    torch.save(torch.nn.Conv2d(3, 3, 3).state_dict(), tmp_path / "other.pth")
    with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):
        load_pretrained_backbone(
            ResNeSt(Depth((1, 1, 1, 1), 8, NO_FILE)), path=str(tmp_path / "other.pth"), online=None
        )
