"""Every backbone learns in bfloat16, can be exported and compiled, and takes images of other channels."""

import pytest
import torch
from every_backbone import BACKBONES, SIZE, config

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.modeling import BACKBONE_REGISTRY, build_backbone, build_model
from fastamp.modeling.recognize import FAMILIES

# Options change few layers, and a compilation takes many seconds.
FAST = {"resnet 18x", "resnext 50x", "shufflenetv2 0.5x", "mobilenetv3 Small", "vit deit_small"}
"""Those that are traced on every run of the tests, which takes seconds each; the others with ``-m export``."""
ONE_OF_A_KIND = list({each.split(" ")[0]: each for each in reversed(BACKBONES)}.values())


def test_none_is_left_out():
    kinds = {backbone.split(" ")[0] for backbone in BACKBONES}
    ours = {name for name in BACKBONE_REGISTRY if BACKBONE_REGISTRY.get(name).__module__.startswith("fastamp.")}
    assert ours == {f"build_{kind}_backbone" for kind in kinds if not kind.startswith("timm/")}
    assert ours == {f"build_{family}_backbone" for family in FAMILIES}  # of which weights are recognized


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
        step.begin()
        with policy.autocast():
            losses = model(batch)
        values.append(step.backward(losses).item())
        if values[-1] < 0.2 * values[0]:
            break
        assert step.finish().ok
    assert values[-1] < 0.2 * values[0], values


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
