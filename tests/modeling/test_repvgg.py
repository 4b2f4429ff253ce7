"""RepVGG: comparison with timm, and equivalence of training form and deploy form."""

import copy

import pytest
import timm
import torch
from small_networks import config

from fastamp.checkpoint.load_state import convert_state_dict, load_model_state
from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.repvgg import DEPTHS, Depth, RepVGG, RepVGGBlock
from fastamp.utils.errors import ConfigError, WeightsError

WIDTHS = {"A0": 1280, "A1": 1280, "A2": 1408, "B0": 1280, "B1": 2048, "B2": 2560, "B3": 2560}
SMALL = Depth((2, 2, 3, 1), (0.25, 0.25, 0.25, 0.25), 4)


def build_meta(depth, *opts):
    with torch.device("meta"):
        return build_backbone(config("build_repvgg_backbone", depth, WIDTHS[depth[:2]], *opts))


def randomized(module):
    """Randomize the batch norms and set evaluation mode."""
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(norm.weight, -1.5, 1.5)
            torch.nn.init.uniform_(norm.bias, -0.5, 0.5)
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.1, 2)
    return module.eval()


def small(**options):
    torch.manual_seed(0)
    return randomized(RepVGG(SMALL, **options))


def assert_same_features(one, other, images):
    with torch.no_grad():
        expected = one(images)
        assert (other(images) - expected).abs().max() <= 1e-5 * expected.abs().max()


def shapes(state):
    return {name: tuple(value.shape) for name, value in state.items()}


@pytest.mark.parametrize("depth", [depth for depth in DEPTHS if "g2" not in depth])
def test_converted_timm_repvgg_weights_have_matching_names_and_shapes(depth):
    with torch.device("meta"):
        reference = timm.create_model(f"repvgg_{depth.lower()}", num_classes=0)
    backbone = build_meta(depth)
    assert shapes(convert_state_dict(backbone, reference.state_dict())[0]) == shapes(backbone.state_dict())
    assert not any(name.startswith("stem") for name in backbone.state_dict())


@pytest.mark.parametrize("depth", DEPTHS)
def test_repvgg_uses_grouped_convolutions_in_every_second_block(depth):
    blocks = [module for module in build_meta(depth).modules() if isinstance(module, RepVGGBlock)]
    groups = int(depth[3:] or 1)
    assert [block.groups for block in blocks] == [1] + [1, groups] * (len(blocks) // 2 - 1) + [1]
    for block in blocks:
        assert block.rbr_dense.conv.weight.shape == (block.channels, block.in_channels // block.groups, 3, 3)
        assert block.rbr_1x1.conv.weight.shape == (block.channels, block.in_channels // block.groups, 1, 1)


def test_repvgg_features_in_training_and_deploy_form_equal_timm(tmp_path):
    reference = randomized(timm.create_model("repvgg_a0", num_classes=7))
    torch.save(reference.state_dict(), tmp_path / "repvgg.pth")
    path = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "repvgg.pth"))
    for deploy in ("False", "True"):
        backbone = build_backbone(
            config(
                "build_repvgg_backbone",
                "A0",
                WIDTHS["A0"],
                *path,
                "MODEL.BACKBONE.LAST_STRIDE",
                "2",
                "MODEL.BACKBONE.DEPLOY",
                deploy,
            )
        )
        for size in ((64, 32), (45, 27)):
            assert_same_features(reference.forward_features, backbone.eval(), torch.randn(2, 3, *size))


@pytest.mark.parametrize("in_channels, channels", [(8, 8), (8, 16)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_repvgg_block_in_deploy_form_computes_same_features(in_channels, channels, stride, groups):
    block = randomized(RepVGGBlock(in_channels, channels, stride=stride, groups=groups, norm="BN", deploy=False))
    fused = copy.deepcopy(block)
    fused.switch_to_deploy()
    assert set(fused.state_dict()) == {"rbr_reparam.weight", "rbr_reparam.bias"}
    assert fused.rbr_reparam.weight.dtype == torch.float32
    x = torch.randn(3, in_channels, 9, 6)
    assert_same_features(block, fused, x)
    state = fused.state_dict()
    fused.switch_to_deploy()
    assert all(torch.equal(fused.state_dict()[name], value) for name, value in state.items())


def test_repvgg_in_deploy_form_computes_same_features():
    backbone, images = small(), torch.randn(2, 3, 64, 32)
    fused = copy.deepcopy(backbone)
    fused.switch_to_deploy()
    assert_same_features(backbone, fused, images)
    assert shapes(fused.state_dict()) == shapes(RepVGG(SMALL, deploy=True).state_dict())
    assert sum(isinstance(module, torch.nn.Conv2d) for module in fused.modules()) == 1 + sum(SMALL.blocks)


def test_repvgg_in_deploy_form_loads_training_and_deploy_weights():
    backbone, images = small(), torch.randn(2, 3, 64, 32)
    fused = copy.deepcopy(backbone)
    fused.switch_to_deploy()
    fastreid_names = {name.replace("rbr_reparam.", "fused_"): value for name, value in fused.state_dict().items()}
    without_counters = {name: value for name, value in backbone.state_dict().items() if "num_batches" not in name}
    for state in (backbone.state_dict(), without_counters, fused.state_dict(), fastreid_names):
        before = {name: value.clone() for name, value in state.items()}
        model = RepVGG(SMALL, deploy=True).eval()
        report = load_model_state(model, state, source="a file", backbone_prefix="")
        assert not report.missing and not report.dropped
        assert_same_features(backbone, model, images)
        assert all(torch.equal(before[name], value) for name, value in state.items())


@pytest.mark.parametrize("suffixes", [("rbr_reparam.weight", "rbr_reparam.bias"), ("fused_weight", "fused_bias")])
def test_loading_deploy_weights_into_repvgg_in_training_form_raises(suffixes):
    fused = small()
    fused.switch_to_deploy()
    names = dict(zip(("rbr_reparam.weight", "rbr_reparam.bias"), suffixes, strict=True))
    state = {
        name.replace(*pair): value
        for name, value in fused.state_dict().items()
        for pair in names.items()
        if pair[0] in name
    }
    with pytest.raises(WeightsError, match="MODEL.BACKBONE.DEPLOY"):
        load_model_state(RepVGG(SMALL), state, source="a file", backbone_prefix="")


def test_loading_incomplete_branches_into_repvgg_in_deploy_form_raises():
    state = {name: value for name, value in small().state_dict().items() if "rbr_1x1" not in name}
    with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):
        load_model_state(RepVGG(SMALL, deploy=True), state, source="a file", backbone_prefix="")


@pytest.mark.parametrize("deploy", [False, True])
def test_repvgg_computes_same_features_from_gray_image_and_replicated_channels(tmp_path, deploy):
    backbone, gray = small(), torch.randn(2, 1, 64, 32)
    torch.save(backbone.state_dict(), tmp_path / "repvgg.pth")
    model = RepVGG(SMALL, in_channels=1, deploy=deploy).eval()
    load_pretrained_backbone(model, path=str(tmp_path / "repvgg.pth"), online=None)
    assert_same_features(lambda images: backbone(images.expand(-1, 3, -1, -1)), model, gray)


def test_repvgg_deploy_form_without_batch_norm_raises():
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.NORM.*BN"):
        build_meta("A1", "MODEL.BACKBONE.DEPLOY", "True", "MODEL.BACKBONE.NORM", "GN")
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.NORM.*BN"):
        build_meta("A1", "MODEL.BACKBONE.NORM", "GN").switch_to_deploy()


def test_repvgg_warns_about_deploy_form_and_raises_for_pretrain_without_path(caplog):
    build_meta("A0", "MODEL.BACKBONE.DEPLOY", "True")
    assert "MODEL.BACKBONE.DEPLOY" in caplog.text
    with pytest.raises(ConfigError, match="PRETRAIN_PATH"):
        build_meta("A0", "MODEL.BACKBONE.PRETRAIN", "True")


def test_repvgg_strided_pointwise_convolution_has_correct_output_and_gradient():
    block = RepVGGBlock(3, 8, stride=2, norm="BN", deploy=False)
    convolution, images = block.rbr_1x1.conv, torch.randn(2, 3, 9, 7)
    images = images.contiguous(memory_format=torch.channels_last)
    expected = convolution.eval()(images)
    out = convolution.train()(images)
    torch.testing.assert_close(out, expected)
    (out * expected.detach()).sum().backward()
    gradient = torch.einsum("bohw,bihw->oi", expected.detach(), images[:, :, ::2, ::2])
    torch.testing.assert_close(convolution.weight.grad[:, :, 0, 0], gradient)
