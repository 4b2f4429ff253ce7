"""Every backbone learns in bfloat16, can be exported and compiled, and takes images of other channels."""

import pytest
import torch
from every_backbone import BACKBONES, SIZE, config
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.modeling import BACKBONE_REGISTRY, build_backbone, build_model

# Options change few layers, and a compilation takes many seconds.
FAST = {"resnet 18x", "resnext 50x", "shufflenetv2 0.5x", "mobilenetv3 Small", "vit deit_small"}
"""Those that are traced on every run of the tests, which takes seconds each; the others with ``-m export``."""
ONE_OF_A_KIND = list({each.split(" ")[0]: each for each in reversed(BACKBONES)}.values())


def test_none_is_left_out():
    kinds = {backbone.split(" ")[0] for backbone in BACKBONES}
    ours = {name for name in BACKBONE_REGISTRY if BACKBONE_REGISTRY.get(name).__module__.startswith("fastamp.")}
    assert ours == {f"build_{kind}_backbone" for kind in kinds if not kind.startswith("timm/")}
    for name in ours:  # so that its weights are recognized
        assert BACKBONE_REGISTRY.get(name).variants.depths, name


@pytest.mark.parametrize("backbone", [each for each in BACKBONES if "DEPLOY" not in each])
def test_it_overfits_a_batch_in_bfloat16(backbone):
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
    """Collects (kernel size, strides, input channels) of the convolutions inside."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            images, weight, _, stride = args[:4]
            self.seen.add((tuple(weight.shape[2:]), tuple(stride), images.shape[1]))
        return function(*args, **(kwargs or {}))


def _of_the_faulty_kernel(seen):
    return [each for each in seen if each[0] == (1, 1) and max(each[1]) > 1 and each[2] < 16]


@pytest.mark.parametrize("backbone", [each for each in ONE_OF_A_KIND if "DEPLOY" not in each])
def test_none_trains_on_the_cpu_by_a_kernel_that_writes_outside_its_memory(backbone):
    """oneDNN's weight gradient of strided 1x1 convolutions of few channels, see RepVGG's _PointwiseConv2d."""
    model = build_backbone(config(backbone)).train()
    with _Convolutions() as convolutions, torch.no_grad():
        model(torch.randn(2, 3, *SIZE))
    assert convolutions.seen or "swin" in backbone or "vit" in backbone
    assert _of_the_faulty_kernel(convolutions.seen) == []


def test_that_kernel_is_seen():
    with _Convolutions() as convolutions, torch.no_grad():
        torch.nn.Conv2d(3, 8, 1, 2)(torch.randn(1, 3, 8, 8))
    assert len(_of_the_faulty_kernel(convolutions.seen)) == 1


@pytest.mark.parametrize(
    "backbone", [pytest.param(each, marks=[] if each in FAST else pytest.mark.export) for each in ONE_OF_A_KIND]
)
def test_it_is_exported_and_compiled_without_a_change(backbone):
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


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_it_takes_images_of_other_channels(backbone, channels):
    with torch.device("meta"):
        model = build_backbone(config(backbone, "INPUT.CHANNELS", str(channels))).eval()
        assert model(torch.zeros(2, channels, *SIZE)).shape[1] == model.feature_dim
