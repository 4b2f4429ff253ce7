"""Look up and build the losses that a config names."""

import logging
from typing import Any

from torch import nn

from fastamp.modeling.losses.pml import PML, build_pml_loss
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

LOSS_REGISTRY = Registry("MODEL.LOSSES.NAME")


def build_losses(cfg: Any) -> nn.ModuleDict:
    """Return the losses of ``MODEL.LOSSES.NAME`` under the names that they are reported by, e.g. ``loss_cls``.

    A loss is a module with a class attribute ``loss_name`` and ``forward(outputs, targets) -> ()``, where
    ``outputs`` is what the head returns in training mode. With a class attribute ``over_pairs = True`` it compares the
    images of a batch with each other by their ``features``, and sees those of all ranks under ``MODEL.LOSSES.GATHER``.

    Raises:
        ConfigError: a name is not registered, or stands there twice, or two losses are reported by one name.
    """
    names = list(cfg.MODEL.LOSSES.NAME)
    if len(set(names)) < len(names):
        raise ConfigError(f"MODEL.LOSSES.NAME names a loss twice: {', '.join(names)}")
    if cfg.MODEL.LOSSES.PML.ARGS and not any(name.startswith(PML) for name in names):
        logger.warning("MODEL.LOSSES.PML.ARGS does nothing: MODEL.LOSSES.NAME has no %s<Name>", PML)
    losses: dict[str, nn.Module] = {}
    for name in names:
        if name.startswith(PML):
            loss = build_pml_loss(cfg, name.removeprefix(PML), feature_dim=feature_dim(cfg))
        else:
            loss = LOSS_REGISTRY.build(name, cfg)
        if loss is None:
            continue  # a loss over classes, where there are none
        if loss.loss_name in losses:
            raise ConfigError(f"MODEL.LOSSES.NAME {', '.join(names)}: two of them are {loss.loss_name}; name one")
        losses[loss.loss_name] = loss
    return nn.ModuleDict(losses)


def check_shareable(losses: nn.ModuleDict, owner: str) -> None:
    """Check that losses can be computed of several features that differ.

    Args:
        losses: of ``build_losses``.
        by: what has those features, for the message.

    Raises:
        ConfigError: a loss has weights of its own, e.g. a center of each identity.
    """
    with_parameters = [type(getattr(loss, "loss", loss)).__name__ for loss in losses.values() if [*loss.parameters()]]
    if with_parameters:
        raise ConfigError(
            f"MODEL.LOSSES.NAME: {', '.join(with_parameters)} has weights of its own, and {owner}, whose features "
            "differ, cannot share them"
        )


def feature_dim(cfg: Any) -> int:
    """Return the width of the ``features`` that a head gives to the losses."""
    heads = cfg.MODEL.HEADS
    backbone_dim = cfg.MODEL.BACKBONE.FEAT_DIM
    after = heads.NECK_FEAT == "after" or heads.NAME == "ClasHead"  # which knows no other
    return (heads.EMBEDDING_DIM or backbone_dim) if after else backbone_dim
