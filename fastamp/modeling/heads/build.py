"""Look up and build the head that a config names."""

from typing import Any

from torch import nn

from fastamp.utils.registry import Registry

HEADS_REGISTRY = Registry("MODEL.HEADS.NAME")


def build_heads(cfg: Any, backbone: nn.Module | None = None) -> nn.Module:
    """Return the head ``MODEL.HEADS.NAME``.

    Args:
        cfg: the config.
        backbone: the one before it. A head that is made of a part of it has a class attribute ``continues_backbone =
            True`` and is built as ``from_config(cfg, backbone=backbone)``.

    Raises:
        ConfigError: it, or one of its parts, is not registered, or it does not go with that backbone.
    """
    name = cfg.MODEL.HEADS.NAME
    continues = getattr(HEADS_REGISTRY.get(name), "continues_backbone", False)
    return HEADS_REGISTRY.build(name, cfg, **({"backbone": backbone} if continues else {}))
