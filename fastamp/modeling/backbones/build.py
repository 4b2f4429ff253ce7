"""Look up and build the backbone that a config names."""

from typing import Any

from torch import nn

from fastamp.modeling.backbones.timm_model import build_timm_backbone
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

BACKBONE_REGISTRY = Registry("MODEL.BACKBONE.NAME")

_TIMM = "timm/"


def build_backbone(cfg: Any) -> nn.Module:
    """Return the backbone ``MODEL.BACKBONE.NAME``; its ``feature_dim`` is the C of its (B, C, h, w) output.

    Raises:
        ConfigError: unknown name or depth, or ``MODEL.BACKBONE.FEAT_DIM`` is not the backbone's width.
    """
    name = cfg.MODEL.BACKBONE.NAME
    if name.startswith(_TIMM):
        return build_timm_backbone(cfg, name.removeprefix(_TIMM))
    backbone = BACKBONE_REGISTRY.build(name, cfg)
    width = getattr(backbone, "feature_dim", cfg.MODEL.BACKBONE.FEAT_DIM)
    if width != cfg.MODEL.BACKBONE.FEAT_DIM:
        raise ConfigError(
            f"MODEL.BACKBONE.FEAT_DIM is {cfg.MODEL.BACKBONE.FEAT_DIM}, but {cfg.MODEL.BACKBONE.NAME} with DEPTH "
            f"{cfg.MODEL.BACKBONE.DEPTH!r} is {width} wide.\n  fix: MODEL.BACKBONE.FEAT_DIM {width}"
        )
    return backbone


def with_feature_dim(cfg: Any, backbone: nn.Module) -> Any:
    """Return ``cfg`` with the width of ``backbone`` as ``FEAT_DIM``, which for timm's models nobody has to know."""
    if not cfg.MODEL.BACKBONE.NAME.startswith(_TIMM):
        return cfg
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.BACKBONE.FEAT_DIM = backbone.feature_dim
    cfg.freeze()
    return cfg
