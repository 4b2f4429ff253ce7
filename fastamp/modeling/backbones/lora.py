"""Low-rank adapters (LoRA) in the blocks of a transformer backbone."""

import logging

from torch import nn

from fastamp.config import CfgNode, Key
from fastamp.contracts import LayeredModule
from fastamp.layers.lora import ADAPTERS, add_adapter
from fastamp.utils.errors import ConfigError, check_choice

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "MODEL.LORA.RANK",
        0,
        "LoRA (Hu et al. 2022): rank of the adapters of the backbone's linear layers. The other weights of the "
        "backbone are frozen; the heads train. 0 disables it.",
        low=0,
    ),
    Key("MODEL.LORA.ALPHA", 16.0, "LoRA: scale of the adapters, which is divided by RANK.", above=0),
    Key(
        "MODEL.LORA.TARGETS",
        ("attention", "mlp"),
        "LoRA: linear layers of each block with adapters: attention (queries, keys, values and projection; VMamba: "
        "projections of the scan), mlp.",
        of=str,
    ),
    Key(
        "MODEL.LORA.BASE",
        "",
        "LoRA: weights without adapters, which are loaded before a MODEL.WEIGHTS file that contains only adapters.",
    ),
)

# Part of the module names of a block -> target.
_TARGETS = {"attn": "attention", "op": "attention", "mlp": "mlp"}
# Embeddings that pretrained weights do not contain.
_NOT_FROZEN = ("sie_embed",)


def with_adapters(cfg: CfgNode, backbone: nn.Module) -> nn.Module:
    """Add adapters to the blocks of a backbone and freeze its other parameters, if ``MODEL.LORA.RANK`` is positive.

    Camera and view embeddings are trained, because pretrained weights do not contain them.

    Returns:
        The backbone.

    Raises:
        ConfigError: if a target is unknown, if the backbone has no linear layers of the targets, or if the rank exceeds
            the width of a layer.
    """
    lora = cfg.MODEL.LORA
    if not lora.RANK:
        return backbone
    for target in lora.TARGETS:
        check_choice("MODEL.LORA.TARGETS", target, tuple(dict.fromkeys(_TARGETS.values())))
    layers = _linear_layers(backbone, lora.TARGETS)
    if not layers:
        raise ConfigError(
            f"MODEL.LORA.RANK is {lora.RANK}, but the blocks of MODEL.BACKBONE.NAME={cfg.MODEL.BACKBONE.NAME} have no "
            f"linear layers of MODEL.LORA.TARGETS ({', '.join(lora.TARGETS) or 'empty'}).\n"
            "  fix: set MODEL.LORA.RANK to 0, or choose a transformer, e.g. build_vit_backbone, build_swin_backbone, "
            "build_clip_vit_backbone or a ViT of timm"
        )
    smallest = min(min(module.get_parameter(name).shape) for module, name in layers)
    if smallest < lora.RANK:
        raise ConfigError(
            f"MODEL.LORA.RANK is {lora.RANK}, but the smallest adapted layer has a width of {smallest}.\n"
            f"  fix: set MODEL.LORA.RANK to at most {smallest}, e.g. 8"
        )
    if not cfg.MODEL.BACKBONE.PRETRAIN and not cfg.MODEL.WEIGHTS:
        logger.warning(
            "MODEL.LORA.RANK=%d freezes random weights of the backbone, unless the run is resumed.\n"
            "  fix: set MODEL.WEIGHTS, or MODEL.BACKBONE.PRETRAIN to True with MODEL.BACKBONE.PRETRAIN_PATH",
            lora.RANK,
        )
    backbone.requires_grad_(False)
    for module, name in layers:
        add_adapter(module, name, rank=lora.RANK, alpha=lora.ALPHA)
    for name, parameter in backbone.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in (*ADAPTERS, *_NOT_FROZEN))
    logger.info(
        "LoRA: %d linear layers of the backbone with adapters of rank %d: %d of its %d parameters train",
        len(layers),
        lora.RANK,
        sum(p.numel() for p in backbone.parameters() if p.requires_grad),
        sum(p.numel() for p in backbone.parameters()),
    )
    return backbone


def _linear_layers(backbone: nn.Module, targets: tuple[str, ...]) -> list[tuple[nn.Module, str]]:
    """List the linear layers of the targets in the blocks of a backbone: (module, name of its weight)."""
    groups = backbone.layer_groups() if isinstance(backbone, LayeredModule) else []
    layers = []
    for block in (block for group in groups[:-1] for block in group):
        for path, module in block.named_modules():
            kinds = {_TARGETS[part] for part in path.split(".") if part in _TARGETS}
            # Packed projections of queries, keys and values are parameters of the attention itself.
            name = "weight" if isinstance(module, nn.Linear) else "in_proj_weight"
            if kinds & set(targets) and name in dict(module.named_parameters(recurse=False)):
                layers.append((module, name))
    return layers
