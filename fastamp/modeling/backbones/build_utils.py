"""What the builders of all backbones do alike: choose a depth, say what does nothing, start from pretrained weights."""

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
    """Return what ``MODEL.BACKBONE.DEPTH`` stands for in ``depths``.

    Raises:
        ConfigError: nothing; the message has the choices and the nearest one.
    """
    check_choice("MODEL.BACKBONE.DEPTH", cfg.MODEL.BACKBONE.DEPTH, tuple(depths))
    return depths[cfg.MODEL.BACKBONE.DEPTH]


def warn_ignored_options(cfg: Any, *names: str) -> None:
    """Log which of the options ``names``, e.g. WITH_NL, are on in ``MODEL.BACKBONE`` although the backbone has none."""
    for name in names:
        if cfg.MODEL.BACKBONE[name]:
            logger.warning("MODEL.BACKBONE.%s does nothing: %s has no such option", name, cfg.MODEL.BACKBONE.NAME)


def with_pretrained_weights(
    model: Model, cfg: Any, online: TorchvisionWeights | Download | None, *, without: tuple[str, ...] = ()
) -> Model:
    """Return ``model``, with pretrained weights if ``MODEL.BACKBONE.PRETRAIN`` is on.

    Args:
        model: a backbone, with random weights.
        cfg: the config.
        online, without: see ``load_pretrained_backbone``, which says what is raised.
    """
    if cfg.MODEL.BACKBONE.PRETRAIN:
        load_pretrained_backbone(model, path=cfg.MODEL.BACKBONE.PRETRAIN_PATH, online=online, without=without)
    return model
