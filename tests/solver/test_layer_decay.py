"""Layer-wise learning-rate decay: the factor of each parameter, by name, for each family of backbones."""

import re

import pytest
from every_backbone import config
from torch import nn

from fastamp.modeling import build_backbone, build_model
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError

D = 0.5
EMBEDDING = "embedding"
FINAL = "final"


def vit_layer(name):
    match = re.search(r"\b(?:blocks|resblocks)\.(\d+)\.", name)
    if match:
        return int(match[1])
    first = name.removeprefix("model.").partition(".")[0]
    return FINAL if first in ("norm", "fc_norm", "ln_post", "proj") else EMBEDDING


def swin_block(stage, block):
    """Number of a block over all stages of a Swin with depths 2, 2, 6, 2."""
    return (0, 2, 4, 10, 12)[int(stage)] + int(block)


def torchvision_swin_layer(name):
    if name.startswith("norm."):
        return FINAL
    index, inner = re.match(r"features\.(\d)\.(\w+)", name).groups()
    if index == "0":
        return EMBEDDING
    merging = int(index) % 2 == 0
    return swin_block(int(index) // 2, -1 if merging else inner)  # a merging belongs to the block before it


def timm_swin_layer(name):
    name = name.removeprefix("model.")
    if name.startswith("norm."):
        return FINAL
    match = re.match(r"layers\.(\d)\.(?:blocks\.(\d)|downsample)", name)
    if not match:
        return EMBEDDING
    return swin_block(match[1], match[2] or -1)


def vmamba_layer(name):
    match = re.match(r"layers\.(\d)\.(?:blocks\.(\d)|downsample)", name)
    if not match:
        return FINAL if name.startswith("classifier.") else EMBEDDING
    return (0, 1, 2, 4, 5)[int(match[1]) + (not match[2])] + int(match[2] or -1)


def resnet_layer(name):
    match = re.match(r"(?:layer|NL_)(\d)\.", name)
    return int(match[1]) - 1 if match else EMBEDDING


SIDE = ("MODEL.BACKBONE.SIE_CAMERAS", "2")
CASES = {
    "vit deit_small": (12, vit_layer, SIDE),
    "clip_vit tiny": (4, vit_layer, SIDE),
    "clip_vit tiny PROJECTION": (4, vit_layer, ()),
    "swin tiny": (12, torchvision_swin_layer, ()),
    "vmamba nano": (5, vmamba_layer, ()),
    "timm/vit_little_patch16_reg4_gap_256": (14, vit_layer, SIDE),
    "timm/vit_small_patch16_dinov3_qkvb": (12, vit_layer, ()),
    "timm/swin_tiny_patch4_window7_224": (12, timm_swin_layer, SIDE),
    "resnet 18x": (4, resnet_layer, ()),
    "resnet 50x WITH_NL": (4, resnet_layer, ()),
}


def rates(cfg, model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(cfg, model).param_groups
    return {names[id(parameter)]: group["base_lr"] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("backbone", CASES)
def test_factor_of_each_backbone_parameter(backbone):
    if backbone.startswith("timm/"):
        pytest.importorskip("timm")
    blocks, layer_of, opts = CASES[backbone]
    cfg = config(backbone, "SOLVER.LAYER_DECAY", str(D), "SOLVER.BASE_LR", "1.0", *opts)
    model = nn.ModuleDict({"backbone": build_backbone(cfg), "heads": nn.Linear(2, 2)})
    found = rates(cfg, model)
    layers = {name: layer_of(name.removeprefix("backbone.")) for name in found if name.startswith("backbone.")}
    ids = {EMBEDDING: 0, FINAL: blocks + 1} | {number: number + 1 for number in range(blocks)}
    expected = {name: D ** (blocks + 1 - ids[layer]) for name, layer in layers.items()}
    expected |= {"heads.weight": 1.0, "heads.bias": 1.0}
    assert found == expected
    assert {number for number in layers.values() if isinstance(number, int)} == set(range(blocks))
    # Off by one: the last block has d, not 1, and the patches d^(L + 1).
    assert min(found.values()) == D ** (blocks + 1)
    assert {D**power for power in range(1, blocks + 2)} <= set(found.values())


def test_decay_combines_with_other_factors():
    opts = (
        "SOLVER.LAYER_DECAY", "0.5", "SOLVER.BASE_LR", "1.0", "SOLVER.HEADS_LR_FACTOR", "10", "SOLVER.BIAS_LR_FACTOR",
        "2", "SOLVER.LR_FACTORS", "{'backbone.blocks.11.mlp.*': 3}", "SOLVER.WEIGHT_DECAY_NORM", "0.0",
    )  # fmt: skip
    cfg = config("vit deit_small", *opts)
    model = build_model(cfg)
    found = rates(cfg, model)
    assert found["backbone.blocks.11.attn.qkv.weight"] == 0.5
    assert found["backbone.blocks.11.attn.qkv.bias"] == 1.0
    assert found["backbone.blocks.11.mlp.fc1.weight"] == 1.5
    assert found["backbone.blocks.10.norm1.weight"] == 0.25
    assert found["backbone.norm.weight"] == 1.0
    assert found["heads.weight"] == 10.0
    groups = {id(p): group for group in build_optimizer(cfg, model).param_groups for p in group["params"]}
    norm = groups[id(model.backbone.blocks[10].norm1.weight)]
    assert norm["weight_decay"] == 0.0 and norm["lr"] == 0.25


def test_blocks_of_jpm_head_have_the_factor_of_the_heads():
    cfg = config(
        "vit deit_small", "SOLVER.LAYER_DECAY", "0.5", "SOLVER.BASE_LR", "1.0", "MODEL.HEADS.NAME", "JPMHead"
    )  # fmt: skip
    found = rates(cfg, build_model(cfg))
    assert {rate for name, rate in found.items() if name.startswith("heads.")} == {1.0}
    assert found["backbone.blocks.10.attn.qkv.weight"] == 0.5  # the last of the 11 blocks that remain
    assert found["backbone.patch_embed.proj.weight"] == 0.5**12


def test_decay_of_one_leaves_groups_and_rates_unchanged():
    cfg = config("osnet x0_25")
    roles = [group["role"] for group in build_optimizer(cfg, build_model(cfg)).param_groups]
    assert not any("layer" in role for role in roles)


def test_backbones_without_layers_and_invalid_values_are_rejected():
    cfg = config("osnet x0_25", "SOLVER.LAYER_DECAY", "0.75")
    with pytest.raises(ConfigError, match=r"SOLVER.LAYER_DECAY.*build_osnet_backbone"):
        build_optimizer(cfg, build_model(cfg))
    for value in ("0", "-0.5", "1.5", "nan"):
        with pytest.raises(ConfigError, match="SOLVER.LAYER_DECAY"):
            config("vit deit_small", "SOLVER.LAYER_DECAY", value)
