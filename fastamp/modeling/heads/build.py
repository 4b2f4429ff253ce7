"""Registry and builder of heads."""

from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Head, HeadBuilder
from fastamp.utils.registry import Registry, adopt

HEADS_REGISTRY = Registry("MODEL.HEADS.NAME", contract=HeadBuilder)


def build_heads(cfg: CfgNode, backbone: nn.Module | None = None) -> nn.Module:
    """Build the head ``MODEL.HEADS.NAME``.

    Args:
        cfg: the config.
        backbone: backbone of the model. If the head class has the attribute ``continues_backbone = True``, the head is
            built by ``from_config(cfg, backbone=backbone)``, which moves the last layers of the backbone into the head.

    Raises:
        ConfigError: if the head or one of its components is not registered, or if the head does not support this
            backbone.
    """
    name = cfg.MODEL.HEADS.NAME
    context = {"backbone": backbone} if HEADS_REGISTRY.get(name).continues_backbone else {}
    return adopt(HEADS_REGISTRY.build(name, cfg, **context), Head)
