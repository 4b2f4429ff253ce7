"""Look up and build the head that a config names."""

from typing import Any

from torch import nn

from fastamp.utils.registry import Registry

HEADS_REGISTRY = Registry("MODEL.HEADS.NAME")


def build_heads(cfg: Any) -> nn.Module:
    """Return the head ``MODEL.HEADS.NAME``.

    Raises:
        ConfigError: it, or one of its parts, is not registered.
    """
    return HEADS_REGISTRY.build(cfg.MODEL.HEADS.NAME, cfg)
