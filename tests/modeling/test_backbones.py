"""All backbones: training in bfloat16, export, compilation, gradients, channels, depths and options."""

import itertools

import pytest
import small_networks
import torch
import torchvision
from every_backbone import BACKBONES, SIZE, config
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.checkpoint.pretrained import load_pretrained_backbone
from fastamp.modeling import BACKBONE_REGISTRY, build_backbone, build_model
from fastamp.utils.errors import ConfigError

# Exported and compiled in every test run; other backbones only with ``-m export``, since each takes seconds.
FAST = {"resnet 18x", "resnext 50x", "shufflenetv2 0.5x", "mobilenetv3 Small", "vit deit_small"}
# One variant of each backbone: options change only a few layers.
FIRST_VARIANTS = list({backbone.split(" ")[0]: backbone for backbone in reversed(BACKBONES)}.values())


def test_list_of_tested_backbones_contains_every_registered_backbone():
    kinds = {backbone.split(" ")[0] for backbone in BACKBONES}
    registered = {name for name in BACKBONE_REGISTRY if BACKBONE_REGISTRY.get(name).__module__.startswith("fastamp.")}
    assert registered == {f"build_{kind}_backbone" for kind in kinds if not kind.startswith("timm/")}
    for name in registered:  # required by infer_config
        assert BACKBONE_REGISTRY.get(name).variants.depths, name


@pytest.mark.integration
@pytest.mark.parametrize("backbone", [backbone for backbone in BACKBONES if "DEPLOY" not in backbone])
def test_backbone_overfits_one_batch_in_bfloat16(backbone):
    cfg = config(backbone)
    model = build_model(cfg).train()
    policy = PrecisionPolicy.from_config(cfg, torch.device("cpu"))
    step = OptimizationStep(model, [torch.optim.Adam(model.parameters(), lr=3e-4)])
    batch = {"images": torch.randint(256, (8, 3, *SIZE), dtype=torch.uint8), "targets": torch.arange(8) // 2}
    values = []
    for _ in range(60):
        step.zero_grad()
        with policy.autocast():
            losses = model(batch)
        step.scale(losses).backward()
        values.append(sum(losses.values()).item())
        if values[-1] < 0.2 * values[0]:
            break
        assert step.finish().ok
    assert values[-1] < 0.2 * values[0], values


class _Convolutions(TorchDispatchMode):
    """Record the kernel size, stride and number of input channels of all convolutions."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            images, weight, _, stride = args[:4]
            self.seen.add((tuple(weight.shape[2:]), tuple(stride), images.shape[1]))
        return function(*args, **(kwargs or {}))


def _strided_pointwise(convolutions):
    return [
        convolution
        for convolution in convolutions
        if convolution[0] == (1, 1) and max(convolution[1]) > 1 and convolution[2] < 16
    ]


@pytest.mark.integration
def test_cpu_training_avoids_strided_pointwise_convolutions_with_few_channels(subtests):
    """oneDNN writes out of bounds in the weight gradient of such a convolution; see RepVGG's ``_PointwiseConv2d``."""
    for backbone in [first_variant for first_variant in FIRST_VARIANTS if "DEPLOY" not in first_variant]:
        with subtests.test(backbone=backbone):
            model = build_backbone(config(backbone)).train()
            with _Convolutions() as convolutions, torch.no_grad():
                model(torch.randn(2, 3, *SIZE))
            assert convolutions.seen or "swin" in backbone or "vit" in backbone
            assert _strided_pointwise(convolutions.seen) == []


def test_convolution_recorder_detects_strided_pointwise_convolution():
    with _Convolutions() as convolutions, torch.no_grad():
        torch.nn.Conv2d(3, 8, 1, 2)(torch.randn(1, 3, 8, 8))
    assert len(_strided_pointwise(convolutions.seen)) == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    "backbone",
    [
        pytest.param(first_variant, marks=[] if first_variant in FAST else pytest.mark.export)
        for first_variant in FIRST_VARIANTS
    ],
)
def test_exported_and_compiled_backbones_compute_same_features_as_eager_mode(backbone):
    model = build_backbone(config(backbone)).eval()
    images = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        expected = model(images)
        exported = torch.export.export(model, (images,)).module()(images)
        names = list(model.state_dict())
        model.compile(backend="aot_eager", fullgraph=True)
        compiled = model(images)
    assert list(model.state_dict()) == names
    for features in (exported, compiled):
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.integration
def test_backbone_accepts_images_with_one_or_four_channels(subtests):
    for channels, backbone in itertools.product([1, 4], BACKBONES):
        with subtests.test(channels=channels, backbone=backbone), torch.device("meta"):
            model = build_backbone(config(backbone, "INPUT.CHANNELS", str(channels))).eval()
            assert model(torch.zeros(2, channels, *SIZE)).shape[1] == model.feature_dim


@pytest.mark.integration
def test_all_parameters_have_gradients(subtests):
    for backbone in [*BACKBONES, "resnest 50x GN"]:
        name = backbone.removesuffix(" GN")
        if name.startswith("two_stem"):
            continue  # trains the stem of one modality
        with subtests.test(backbone):
            opts = ("MODEL.BACKBONE.NORM", "GN") if name != backbone else ()
            model = build_backbone(config(name, *opts)).train()
            for module in model.modules():
                if type(module).__name__ == "NonLocal":
                    torch.nn.init.ones_(module.W[1].weight)  # initialized to 0, which blocks gradients
            # The mean and the mean square of normalized values are constant.
            (model(torch.randn(4, 3, *SIZE)) ** 3).mean().backward()
            assert [name for name, p in model.named_parameters() if p.grad is None and p.requires_grad] == []


# Network, depth, width -> name in torchvision, and its feature map of images x.
TORCHVISION = {
    ("regnet", "800x", 672): ("regnet_x_800mf", lambda net, x: net.trunk_output(net.stem(x))),
    ("regnet", "400y", 440): ("regnet_y_400mf", lambda net, x: net.trunk_output(net.stem(x))),
    ("effnet", "b0", 1280): ("efficientnet_b0", lambda net, x: net.features(x)),
    ("resnext", "50x", 2048): ("resnext50_32x4d", lambda net, x: torch.nn.Sequential(*list(net.children())[:-2])(x)),
    ("swin", "tiny", 768): ("swin_t", lambda net, x: net.norm(net.features(x)).permute(0, 3, 1, 2)),
}


@pytest.mark.integration
@pytest.mark.parametrize(("network", "depth", "width"), TORCHVISION)
def test_weights_of_torchvision_give_its_features(network, depth, width, tmp_path, caplog):
    torch.manual_seed(1)
    name, feature_map = TORCHVISION[network, depth, width]
    reference = torchvision.models.get_model(name).eval()
    for key, value in reference.state_dict().items():
        if "running" in key:
            value.uniform_(0.5, 1.5)
    torch.save(reference.state_dict(), tmp_path / "weights.pth")
    opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(tmp_path / "weights.pth"))
    opts += ("MODEL.BACKBONE.LAST_STRIDE", "2")
    backbone = build_backbone(small_networks.config(f"build_{network}_backbone", depth, width, *opts)).eval()
    assert "keep their initial values" not in caplog.text
    for size in ((64, 32), (75, 41)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(backbone(x), feature_map(reference, x))


@pytest.mark.parametrize("backbone", ["regnet 200y", "effnet b0"])
def test_pycls_weights_with_classifier_load(backbone, tmp_path):
    model = build_backbone(config(backbone))
    state = {key: torch.full_like(value, 2) for key, value in model.state_dict().items()}
    state["head.fc.weight"] = torch.ones(1000, BACKBONES[backbone])
    torch.save({"epoch": 99, "model_state": state, "cfg": "MODEL: {}"}, tmp_path / "net.pyth")
    load_pretrained_backbone(model, path=str(tmp_path / "net.pyth"), online=None)
    assert all((value == 2).all() for value in model.state_dict().values())


def test_last_stride_1_doubles_the_size_of_the_feature_map(subtests):
    for backbone in ("regnet 200x", "effnet b0", "resnext 50x WITH_IBN"):
        for stride, size in ((1, (4, 2)), (2, (2, 1))):
            with subtests.test(backbone, stride=stride), torch.device("meta"):
                model = build_backbone(config(backbone, "MODEL.BACKBONE.LAST_STRIDE", str(stride))).eval()
                assert model(torch.zeros(1, 3, *SIZE)).shape == (1, BACKBONES[backbone], *size)


def test_error_for_unknown_depth_lists_choices_and_suggests_the_nearest_depth(subtests):
    for network, depth, choices in (
        ("resnet", "50", ".*'50x'"),
        ("resnext", "152x", "50x, 101x"),
        ("resnest", "50", "50x, 101x, 200x, 269x.*'50x'"),
        ("regnet", "800", "200x.*'800[xy]'"),
        ("effnet", "B0", "b0, b1.*'b0'"),
        ("mobilenetv2", "1.0", ".*'1.0x'"),
        ("mobilenetv3", "large", ".*'Large'"),
        ("shufflenetv2", "1x", "0.5x, 1.0x, 1.5x, 2.0x"),
        ("osnet", "x1.0", ".*'x1_0'"),
        ("osnet_ain", "x1.0", ".*'x1_0'"),
        ("repvgg", "A0x", "A0, A1.*'A0'"),
        ("swin", "bse", "tiny, small, base.*'base'"),
        ("vit", "deit_smal", ".*'deit_small'"),
    ):
        error = rf"MODEL\.BACKBONE\.DEPTH: .*'{depth}'; choices: {choices}"
        with subtests.test(network), pytest.raises(ConfigError, match=error):
            build_backbone(small_networks.config(f"build_{network}_backbone", depth, 1))


def test_options_that_a_backbone_ignores_are_reported(subtests, caplog):
    for backbone, keys in (
        ("resnet 18x", ("CHECKPOINTING", "SIE_CAMERAS")),
        ("resnext 50x", ("WITH_SE",)),
        ("resnest 50x", ("WITH_IBN", "WITH_SE", "WITH_NL")),
        ("regnet 200x", ("WITH_SE",)),
        ("effnet b0", ("WITH_IBN",)),
        ("mobilenetv2 0.25x", ("WITH_NL",)),
        ("mobilenetv3 Small", ("WITH_NL",)),
        ("osnet_ain x0_25", ("WITH_IBN", "WITH_SE")),
        ("repvgg A0", ("WITH_IBN",)),
    ):
        with subtests.test(backbone), torch.device("meta"):
            caplog.clear()
            values = {f"MODEL.BACKBONE.{key}": "3" if key == "SIE_CAMERAS" else "True" for key in keys}
            build_backbone(config(backbone, *(text for pair in values.items() for text in pair)))
            assert all(key in caplog.text for key in values)
