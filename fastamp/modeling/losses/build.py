"""Look up and build the losses that a config names."""

from typing import Any

from torch import nn

from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

LOSS_REGISTRY = Registry("MODEL.LOSSES.NAME")


def build_losses(cfg: Any) -> nn.ModuleDict:
    """Return the losses of ``MODEL.LOSSES.NAME`` under the names that they are reported by, e.g. ``loss_cls``.

    A loss is a module with a class attribute ``loss_name`` and ``forward(outputs, targets) -> ()``, where
    ``outputs`` is what the head returns in training mode. With a class attribute ``over_pairs = True`` it compares the
    images of a batch with each other by their ``features``, and sees those of all ranks under ``MODEL.LOSSES.GATHER``.

    Raises:
        ConfigError: a name is not registered, or stands there twice.
    """
    names = list(cfg.MODEL.LOSSES.NAME)
    if len(set(names)) < len(names):
        raise ConfigError(f"MODEL.LOSSES.NAME names a loss twice: {', '.join(names)}")
    losses = [LOSS_REGISTRY.build(name, cfg) for name in names]
    return nn.ModuleDict({loss.loss_name: loss for loss in losses})


def feature_dim(cfg: Any) -> int:
    """Return the width of the ``features`` that a head gives to the losses."""
    heads = cfg.MODEL.HEADS
    whole = cfg.MODEL.BACKBONE.FEAT_DIM
    return (heads.EMBEDDING_DIM or whole) if heads.NECK_FEAT == "after" else whole
