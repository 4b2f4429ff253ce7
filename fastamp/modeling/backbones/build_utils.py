"""Helpers for backbone builders: depth lookup, ignored options, pretrained weights."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from fastamp.checkpoint.pretrained import Download, TorchvisionWeights, load_pretrained_backbone
from fastamp.utils.errors import check_choice
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__, {"warn_of_ignored_keys": "fastamp.modeling.backbones.build_utils.warn_ignored_options"}
)

logger = logging.getLogger(__name__)

Depth = TypeVar("Depth")
Model = TypeVar("Model", bound=nn.Module)


def choose_depth(cfg: Any, depths: Mapping[str, Depth]) -> Depth:
    """Return the entry of ``depths`` for ``MODEL.BACKBONE.DEPTH``.

    Raises:
        ConfigError: if the depth is unknown; the message lists the choices and suggests the nearest one.
    """
    check_choice("MODEL.BACKBONE.DEPTH", cfg.MODEL.BACKBONE.DEPTH, tuple(depths))
    return depths[cfg.MODEL.BACKBONE.DEPTH]


def warn_ignored_options(cfg: Any, *names: str, disabled: Any = False) -> None:
    """Log a warning for each unsupported option in ``names``, e.g. ``WITH_NL``, that ``MODEL.BACKBONE`` enables.

    Args:
        cfg (CfgNode): the config.
        names (str): keys below ``MODEL.BACKBONE``.
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
    model: Model, cfg: Any, online: TorchvisionWeights | Download | None, *, without: tuple[str, ...] = ()
) -> Model:
    """Load pretrained weights into ``model`` if ``MODEL.BACKBONE.PRETRAIN`` is True, and return ``model``.

    Args:
        model (Model): backbone with random weights, modified in place.
        cfg (CfgNode): the config.
        online, without: see ``load_pretrained_backbone``.

    Raises:
        ConfigError, WeightsError: see ``load_pretrained_backbone``.
    """
    if cfg.MODEL.BACKBONE.PRETRAIN:
        load_pretrained_backbone(model, path=cfg.MODEL.BACKBONE.PRETRAIN_PATH, online=online, without=without)
    return model
