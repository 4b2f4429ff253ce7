"""ResNeXt: comparison with torchvision, and FastReID's options."""

import pytest
import torch
import torchvision
from small_networks import config

from fastamp.checkpoint.load_state import load_model_state
from fastamp.modeling import build_backbone
from fastamp.modeling.backbones.resnext import DEPTHS
from fastamp.utils.errors import ConfigError


def build_meta(depth, *opts):
    with torch.device("meta"):
        return build_backbone(config("build_resnext_backbone", depth, 2048, *opts))


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items() if not name.startswith("fc.")}


def test_resnext_101x_parameter_names_and_shapes_equal_torchvision():
    with torch.device("meta"):
        reference = torchvision.models.ResNet(
            torchvision.models.resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4
        )
    assert shapes(build_meta("101x")) == shapes(reference)


@pytest.mark.parametrize("depth", DEPTHS)
def test_resnext_with_ibn_has_instance_norm_in_all_stages(depth):
    names = build_meta(depth, "MODEL.BACKBONE.WITH_IBN", "True").state_dict().keys()
    for stage, blocks in enumerate(DEPTHS[depth].blocks, start=1):
        assert sum(f"layer{stage}." in name and name.endswith("bn1.IN.weight") for name in names) == blocks
    assert "bn1.weight" in names


@pytest.mark.filterwarnings("ignore:.*which is a no-op:UserWarning")
def test_resnext_with_ibn_loads_weights_without_instance_norm_in_last_stage():
    """IBN-Net's ResNeXt-101 file has no instance norm in the last stage."""
    backbone = build_meta("101x", "MODEL.BACKBONE.WITH_IBN", "True")
    plain = build_meta("101x").state_dict()
    full = backbone.state_dict()
    state = {name: value for name, value in full.items() if not (name.startswith("layer4") and ".bn1." in name)}
    state |= {name: value for name, value in plain.items() if name.startswith("layer4") and ".bn1." in name}
    state = {
        name: torch.zeros(()).expand(value.shape) for name, value in state.items()
    }  # expanded scalars need no memory
    report = load_model_state(backbone, state, source="a file", backbone_prefix="")
    assert len(report.missing) == 3 * 6
    assert report.backbone_fraction > 0.95


@pytest.mark.parametrize("depth", DEPTHS)
def test_resnext_stages_2_and_3_have_non_local_blocks(depth):
    backbone = build_meta(depth, "MODEL.BACKBONE.WITH_NL", "True")
    assert [len(getattr(backbone, f"NL_{stage}")) for stage in (1, 2, 3, 4)] == [0, 2, 3, 0]


def test_pretrain_of_resnext_depth_without_published_weights_raises():
    with pytest.raises(ConfigError, match="PRETRAIN_PATH"):
        build_meta("101x", "MODEL.BACKBONE.PRETRAIN", "True")
