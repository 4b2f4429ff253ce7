"""MobileNetV2 and V3: comparison with torchvision, and FastReID's parameter names and last layer."""

import pytest
import torch
import torchvision
from small_networks import Layers, build, config, count_parameters

from fastamp.checkpoint.load_state import load_model_state
from fastamp.modeling import build_backbone
from fastamp.utils.errors import WeightsError

V2, V3 = "build_mobilenetv2_backbone", "build_mobilenetv3_backbone"


@pytest.mark.parametrize(
    "depth, millions",
    [("1.0x", 3.504), ("0.75x", 2.636), ("0.5x", 1.968), ("0.35x", 1.677), ("0.25x", 1.519), ("0.1x", 1.356)],
)
def test_mobilenetv2_parameter_counts_equal_published_counts(depth, millions):
    """The published counts include the 1281000 parameters of the classifier."""
    assert (count_parameters(V2, depth, 1280) + 1281000) / 1e6 == pytest.approx(millions, abs=1.1e-3)


@pytest.mark.parametrize("depth, width", [("Large", 1280), ("Small", 1024)])
def test_mobilenetv3_parameter_counts_match_torchvision(depth, width):
    """The expected count excludes torchvision's second classifier layer; batch norm has one vector more than a bias."""
    with torch.device("meta"):
        reference = torchvision.models.get_model(f"mobilenet_v3_{depth.lower()}")
    expected = sum(p.numel() for p in reference.parameters()) - (width * 1000 + 1000) + width
    assert count_parameters(V3, depth, width) == expected


def to_fastreid_names(state):
    """Rename torchvision's parameters to FastReID's names: consecutive numbers in a block, last layer ``conv``."""
    in_block = {"0.0": 0, "0.1": 1, "1.0": 3, "1.1": 4, "2": 6, "3": 7}
    in_first = {"0.0": 0, "0.1": 1, "1": 3, "2": 4}
    renamed = {}
    for key, value in state.items():
        parts = key.split(".")
        if parts[2] == "conv":
            row = in_first if parts[1] == "1" else in_block
            key = ".".join([*parts[:3], str(row[".".join(parts[3:-1])]), parts[-1]])
        renamed[key.replace("features.18.", "conv.")] = value
    return renamed


def naive_v2(state, x):
    """Compute the feature map of MobileNetV2 from a state dict with FastReID's parameter names."""
    layers = Layers(state)

    def unit(x, conv, bn, stride=1, linear=False):
        x = layers.bn(layers.conv(x, conv, stride), bn)
        return x if linear else x.clamp(0, 6)

    x = unit(x, "features.0.0", "features.0.1", 2)
    for number in range(1, 18):
        prefix, out = f"features.{number}.conv", x
        start = 0 if number == 1 else 3
        if start:
            out = unit(out, f"{prefix}.0", f"{prefix}.1")
        out = unit(out, f"{prefix}.{start}", f"{prefix}.{start + 1}", 2 if number in (2, 4, 7, 14) else 1)
        out = unit(out, f"{prefix}.{start + 3}", f"{prefix}.{start + 4}", linear=True)
        x = x + out if x.shape == out.shape else out
    return unit(x, "conv.0", "conv.1")


@pytest.mark.parametrize("depth", ["1.0x", "0.35x", "0.1x"])
def test_mobilenetv2_with_fastreid_weights_equals_naive_computation(depth):
    origin, images = build(V2, depth, 1280), torch.randn(2, 3, 71, 45).double()
    state = to_fastreid_names(origin.state_dict())
    assert {"features.1.conv.4.running_var", "features.17.conv.7.bias", "conv.1.weight"} <= state.keys()
    backbone = build_backbone(config(V2, depth, 1280)).eval().double()
    report = load_model_state(backbone, state, source="FastReID", backbone_prefix="")
    assert report.missing == report.dropped == []
    with torch.no_grad():
        maps = backbone(images)
        torch.testing.assert_close(maps, naive_v2(state, images))
    assert maps.shape == (2, 1280, 3, 2) and maps.std() > 0.01


@pytest.mark.parametrize("depth", ["Large", "Small"])
def test_mobilenetv3_equals_torchvision_except_for_epsilon_and_last_layer(depth):
    backbone = build(V3, depth, 1280 if depth == "Large" else 1024)
    state = backbone.state_dict()
    reference = torchvision.models.get_model(f"mobilenet_v3_{depth.lower()}").features.eval().double()
    reference.load_state_dict({k.removeprefix("features."): v for k, v in state.items() if k.startswith("features.")})
    for module in reference.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.eps == 1e-3
            module.eps = 1e-5
    images, layers = torch.randn(2, 3, 64, 32).double(), Layers(state)
    with torch.no_grad():
        expected = layers.bn(layers.conv(reference(images), "conv.0"), "conv.1").clamp(0, 6)
        maps = backbone(images)
    torch.testing.assert_close(maps, expected)
    assert maps.shape == (2, backbone.feature_dim, 2, 1) and maps.std() > 0.01


@pytest.mark.parametrize("name, depth, reference", [(V2, "1.0x", "mobilenet_v2"), (V3, "Small", "mobilenet_v3_small")])
@pytest.mark.parametrize("channels", [1, 3])
def test_mobilenet_loads_torchvision_weights_for_one_and_three_image_channels(
    tmp_path, name, depth, reference, channels
):
    origin, path = torchvision.models.get_model(reference), tmp_path / "model.pth"
    torch.save(origin.state_dict(), path)
    opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))
    width = 1280 if name == V2 else 1024
    backbone = build_backbone(config(name, depth, width, *opts, "INPUT.CHANNELS", str(channels)))
    assert backbone.features[0][0].weight.shape[1] == channels
    expected = origin.features.state_dict()
    if channels == 1:
        expected["0.0.weight"] = expected["0.0.weight"].sum(dim=1, keepdim=True)
    assert all(torch.equal(value, expected[key]) for key, value in backbone.features.state_dict().items())


def test_mobilenetv2_loads_fastreid_weights_only_for_the_same_depth(tmp_path):
    origin, path = build(V2, "0.25x", 1280), tmp_path / "mobilenetv2_0.25.pth"
    torch.save(to_fastreid_names(origin.state_dict()) | {"classifier.weight": torch.ones(10, 1280)}, path)
    opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))
    backbone = build_backbone(config(V2, "0.25x", 1280, *opts))
    assert all(torch.equal(value, origin.state_dict()[key].float()) for key, value in backbone.state_dict().items())
    with pytest.raises(WeightsError, match="MODEL.BACKBONE.DEPTH"):
        build_backbone(config(V2, "0.35x", 1280, *opts))


@pytest.mark.parametrize("name, depth", [(V2, "0.1x"), (V3, "Small")])
def test_mobilenet_initial_weight_variance_is_2_over_fan_out(name, depth):
    backbone = build_backbone(config(name, depth, 1280 if name == V2 else 1024, "INPUT.CHANNELS", "4"))
    big = [m for m in backbone.modules() if isinstance(m, torch.nn.Conv2d) and m.weight.numel() > 400]
    for module in [backbone.features[0][0], *big]:
        fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
        assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.15)
