"""All backbones: training in bfloat16, export, compilation, and images with one or four channels."""

import itertools

import pytest
import torch
from every_backbone import BACKBONES, SIZE, config
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.modeling import BACKBONE_REGISTRY, build_backbone, build_model

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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
