"""Look up and build the backbone that a config names."""

from typing import Any

from torch import nn

from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

BACKBONE_REGISTRY = Registry("MODEL.BACKBONE.NAME")


def build_backbone(cfg: Any) -> nn.Module:
    """Return the backbone ``MODEL.BACKBONE.NAME``; its ``feature_dim`` is the C of its (B, C, h, w) output.

    Raises:
        ConfigError: unknown name or depth, or ``MODEL.BACKBONE.FEAT_DIM`` is not the backbone's width.
    """
    backbone = BACKBONE_REGISTRY.build(cfg.MODEL.BACKBONE.NAME, cfg)
    width = getattr(backbone, "feature_dim", cfg.MODEL.BACKBONE.FEAT_DIM)
    if width != cfg.MODEL.BACKBONE.FEAT_DIM:
        raise ConfigError(
            f"MODEL.BACKBONE.FEAT_DIM is {cfg.MODEL.BACKBONE.FEAT_DIM}, but {cfg.MODEL.BACKBONE.NAME} with DEPTH "
            f"{cfg.MODEL.BACKBONE.DEPTH!r} is {width} wide.\n  fix: MODEL.BACKBONE.FEAT_DIM {width}"
        )
    return backbone
