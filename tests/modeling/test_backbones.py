"""Every backbone learns in bfloat16, can be exported and compiled, and takes images of other channels."""

import pytest
import torch

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.modeling import BACKBONE_REGISTRY, build_backbone, build_model
from fastamp.modeling.recognize import FAMILIES

# The smallest of each kind.
BACKBONES = {
    "resnet 18x": 512,
    "resnet 18x WITH_IBN": 512,
    "resnet 50x WITH_NL": 2048,
    "resnet 18x WITH_SE": 512,
    "resnext 50x": 2048,
    "resnext 50x WITH_IBN": 2048,
    "resnest 50x": 2048,
    "osnet x0_25": 128,
    "osnet x0_25 WITH_IBN": 128,
    "osnet_ain x0_25": 128,
    "repvgg A0": 1280,
    "repvgg A0 DEPLOY": 1280,
    "mobilenetv2 0.25x": 1280,
    "mobilenetv3 Small": 1024,
    "shufflenetv2 0.5x": 1024,
    "effnet b0": 1280,
    "regnet 200x": 368,
    "regnet 200y": 368,
    "vit deit_small": 384,
    "swin tiny": 768,
    "timm/mobilenetv3_small_050": 0,
    "timm/vit_tiny_patch16_224": 0,
}
SIZE = (64, 32)
# Options change few layers, and a compilation takes many seconds.
ONE_OF_A_KIND = list({each.split(" ")[0]: each for each in reversed(BACKBONES)}.values())


def config(backbone, *opts):
    cfg = get_cfg()
    name, *rest = backbone.split(" ")
    if not name.startswith("timm/"):
        name = f"build_{name}_backbone"
        opts = ("MODEL.BACKBONE.DEPTH", rest[0], "MODEL.BACKBONE.FEAT_DIM", str(BACKBONES[backbone]), *opts)
        opts += tuple(each for option in rest[1:] for each in (f"MODEL.BACKBONE.{option}", "True"))
    cfg.merge_from_list([
        "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", name, "INPUT.SIZE_TRAIN", SIZE, "INPUT.SIZE_TEST", SIZE,
        "MODEL.HEADS.WITH_BNNECK", "True", "MODEL.HEADS.NUM_CLASSES", "4", "SOLVER.AMP", "bf16", *opts,
    ])  # fmt: skip
    return cfg


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


@pytest.mark.parametrize("backbone", ONE_OF_A_KIND)
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
