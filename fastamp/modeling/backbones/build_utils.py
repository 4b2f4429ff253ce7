"""Helpers for backbone builders: depth lookup, ignored options, pretrained weights."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from fastamp.checkpoint.pretrained import Download, TorchvisionWeights, load_pretrained_backbone
from fastamp.config import CfgNode
from fastamp.utils.errors import check_choice

logger = logging.getLogger(__name__)

Depth = TypeVar("Depth")
Model = TypeVar("Model", bound=nn.Module)

LayerGroups = list[list[nn.Module | nn.Parameter]]
"""Layers of a backbone with L blocks: modules and parameters of each block, and those after the last block."""


def choose_depth(cfg: CfgNode, depths: Mapping[str, Depth], *, supported: tuple[str, ...] = ()) -> Depth:
    """Return the entry of ``depths`` for ``MODEL.BACKBONE.DEPTH``; warn of options that the backbone ignores.

    Args:
        cfg: the config.
        depths: supported values of the key, each with the structure of the network.
        supported: those of ``WITH_IBN``, ``WITH_SE`` and ``WITH_NL`` that are not ignored. Default: none.

    Raises:
        ConfigError: if the depth is unknown; the message lists the choices and suggests the nearest one.
    """
    check_choice("MODEL.BACKBONE.DEPTH", cfg.MODEL.BACKBONE.DEPTH, tuple(depths))
    warn_ignored_options(cfg, *(name for name in ("WITH_IBN", "WITH_SE", "WITH_NL") if name not in supported))
    return depths[cfg.MODEL.BACKBONE.DEPTH]


def warn_ignored_options(cfg: CfgNode, *names: str, disabled: Any = False) -> None:
    """Log a warning for each unsupported option in ``names``, e.g. ``WITH_NL``, that ``MODEL.BACKBONE`` enables.

    Args:
        cfg: the config.
        names: keys below ``MODEL.BACKBONE``.
        disabled: value that disables the options. Default False.
    """
    for name in names:
        if cfg.MODEL.BACKBONE[name]:
            logger.warning(
                "MODEL.BACKBONE.%s is ignored: %s does not support it.\n  fix: set it to %s",
                name,
                cfg.MODEL.BACKBONE.NAME,
                disabled,
            )


def with_pretrained_weights(
    model: Model, cfg: CfgNode, online: TorchvisionWeights | Download | None, *, without: tuple[str, ...] = ()
) -> Model:
    """Load pretrained weights into ``model`` if ``MODEL.BACKBONE.PRETRAIN`` is True, and return ``model``.

    Args:
        model: backbone with random weights, modified in place.
        cfg: the config.
        online, without: see ``load_pretrained_backbone``.

    Raises:
        ConfigError, WeightsError: see ``load_pretrained_backbone``.
    """
    if cfg.MODEL.BACKBONE.PRETRAIN:
        load_pretrained_backbone(model, path=cfg.MODEL.BACKBONE.PRETRAIN_PATH, online=online, without=without)
    return model


def layers_in_order(module: nn.Module, container: str) -> LayerGroups:
    """List the layers of a backbone whose child ``container`` has the blocks, for layer-wise learning-rate decay.

    If the container has stages, modules with a child ``blocks``, the blocks are counted over all stages. The other
    modules of a stage, e.g. a patch merging, belong to the block before them.

    Returns:
        Modules of each block, in order, then the children of ``module`` after the container, e.g. the final norm.
        Modules before the first block are not listed.
    """
    groups: LayerGroups = []
    for block in module.get_submodule(container).children():
        for name, part in block.named_children() if "blocks" in dict(block.named_children()) else [("", block)]:
            if name == "blocks":
                groups.extend([child] for child in part.children())
            elif not name:
                groups.append([part])
            elif groups:
                groups[-1].append(part)
    names = [name for name, _ in module.named_children()]
    after = names[names.index(container) + 1 :]
    return [*groups, [module.get_submodule(name) for name in after]]
