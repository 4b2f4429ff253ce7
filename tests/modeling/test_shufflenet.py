"""ShuffleNetV2: parameter counts, comparison with a plain computation, and the authors' files."""

import pytest
import torch
import torch.nn.functional as F
from small_networks import Layers, build, config, count_parameters

from fastamp.modeling import build_backbone
from fastamp.utils.errors import ConfigError

NAME = "build_shufflenetv2_backbone"


@pytest.mark.parametrize(
    "depth, width, millions", [("0.5x", 1024, 1.4), ("1.0x", 1024, 2.3), ("1.5x", 1024, 3.5), ("2.0x", 2048, 7.4)]
)
def test_shufflenetv2_parameter_counts_equal_published_counts(depth, width, millions):
    """The published counts include a classifier for 1000 classes."""
    assert (count_parameters(NAME, depth, width) + 1000 * width) / 1e6 == pytest.approx(millions, abs=0.05)


def naive_forward(state, x):
    """Compute the feature map of ``x`` from the tensors of a state dict; shuffle with a loop over channels."""
    layers = Layers(state)

    def pointwise(x, name, position):
        return layers.bn(layers.conv(x, f"{name}.{position}"), f"{name}.{position + 1}").relu()

    def depthwise(x, name, position, stride):
        return layers.bn(layers.conv(x, f"{name}.{position}", stride), f"{name}.{position + 1}")

    x = layers.bn(layers.conv(x, "first_conv.0", 2), "first_conv.1").relu()
    x = F.max_pool2d(x, 3, 2, 1)
    for number in range(16):
        main, around, stride = f"features.{number}.branch_main", f"features.{number}.branch_proj", 1
        passing = inner = x
        if number in (0, 4, 12):
            stride = 2
            passing = pointwise(depthwise(x, around, 0, 2), around, 2)
        else:
            passing, inner = (torch.stack([x[:, i] for i in range(s, x.shape[1], 2)], dim=1) for s in (0, 1))
        inner = pointwise(depthwise(pointwise(inner, main, 0), main, 3, stride), main, 5)
        x = torch.cat((passing, inner), dim=1)
    return pointwise(x, "conv_last", 0)


@pytest.mark.parametrize("depth, width", [("0.5x", 1024), ("2.0x", 2048)])
def test_shufflenetv2_features_equal_naive_computation(depth, width):
    backbone, images = build(NAME, depth, width), torch.randn(2, 3, 71, 45).double()
    with torch.no_grad():
        maps = backbone(images)
        torch.testing.assert_close(maps, naive_forward(backbone.state_dict(), images))
    assert maps.shape == (2, width, 3, 2) and maps.std() > 0.01


def test_shufflenetv2_loads_weights_file_of_authors(tmp_path):
    origin, path = build(NAME, "0.5x", 1024), tmp_path / "ShuffleNetV2.0.5x.pth.tar"
    state = {f"module.{key}": value for key, value in origin.state_dict().items()}
    torch.save({"state_dict": state | {"module.classifier.0.weight": torch.ones(10, 1024)}}, path)
    opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))
    backbone = build_backbone(config(NAME, "0.5x", 1024, *opts))
    assert all(torch.equal(value, origin.state_dict()[key].float()) for key, value in backbone.state_dict().items())


def test_shufflenetv2_pretrain_without_pretrain_path_raises():
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.PRETRAIN"):
        build_backbone(config(NAME, "1.0x", 1024, "MODEL.BACKBONE.PRETRAIN", "True"))


def test_shufflenetv2_initial_weights_have_standard_deviations_of_authors_code():
    backbone = build_backbone(config(NAME, "1.0x", 1024))
    assert backbone.first_conv[0].weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert backbone.features[1].branch_main[3].weight.std().item() == pytest.approx(1, rel=0.1)
    assert backbone.conv_last[0].weight.std().item() == pytest.approx(1 / 464, rel=0.1)
    assert (backbone.features[9].branch_main[1].bias == 0.0001).all()
