"""Registry and builder of losses."""

import logging

from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import Loss, LossBuilder
from fastamp.layers import pooled_width
from fastamp.modeling.losses.pml import PML, PMLLoss, build_pml_loss
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry, adopt

logger = logging.getLogger(__name__)

LOSS_REGISTRY = Registry("MODEL.LOSSES.NAME", contract=LossBuilder)


class ConfiguredLoss(nn.Module, Loss):
    """Base class of losses whose arguments are the values of a section of the config.

    Attributes:
        section: name of the section in ``MODEL.LOSSES``.
    """

    section: str

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "ConfiguredLoss":
        """Build the loss; the keys of the section are its arguments."""
        return cls(**{key.lower(): value for key, value in cfg.MODEL.LOSSES[cls.section].items()})


def build_losses(cfg: CfgNode) -> nn.ModuleDict:
    """Build the losses listed in ``MODEL.LOSSES.NAME``.

    Returns:
        Loss name, as in the logs (e.g. ``loss_cls``) -> module, see the contract ``Loss``.

    Raises:
        ConfigError: if a loss is not registered or listed twice, or if two losses have the same ``loss_name``.
    """
    names = list(cfg.MODEL.LOSSES.NAME)
    if len(set(names)) < len(names):
        raise ConfigError(f"MODEL.LOSSES.NAME contains duplicates: {', '.join(names)}.\n  fix: list each loss once")
    if names and cfg.MODEL.LOSSES.PML.ARGS and not any(name.startswith(PML) for name in names):
        logger.warning(
            "MODEL.LOSSES.PML.ARGS is ignored: MODEL.LOSSES.NAME contains no %s<Name>.\n"
            "  fix: add the loss to MODEL.LOSSES.NAME, or remove MODEL.LOSSES.PML.ARGS",
            PML,
        )
    losses: dict[str, nn.Module] = {}
    for name in names:
        if name.startswith(PML):
            loss = build_pml_loss(cfg, name.removeprefix(PML), feature_dim=feature_dim(cfg))
        else:
            loss = LOSS_REGISTRY.build(name, cfg)
        if loss is None:
            continue  # the loss needs classes, and the model is built without them
        if loss.loss_name in losses:
            raise ConfigError(
                f"MODEL.LOSSES.NAME: two of the losses {', '.join(names)} are logged as {loss.loss_name}.\n"
                "  fix: remove one of the two losses"
            )
        losses[loss.loss_name] = adopt(loss, Loss)
    return nn.ModuleDict(losses)


def check_shareable(losses: nn.ModuleDict, owner: str) -> None:
    """Check that the losses learn nothing, neither parameters nor buffers, so that several outputs can share them.

    Args:
        losses: result of ``build_losses``.
        owner: description of the outputs in the error message.

    Raises:
        ConfigError: if a loss has learnable parameters, e.g. the centers of ``CenterLoss``, or buffers that it trains.
    """
    with_parameters = [
        type(loss.loss if isinstance(loss, PMLLoss) else loss).__name__
        for loss in losses.values()
        if [*loss.parameters()] or loss.written_in_forward
    ]
    if with_parameters:
        raise ConfigError(
            f"MODEL.LOSSES.NAME: losses with learnable parameters ({', '.join(with_parameters)}) cannot be shared "
            f"across {owner}, because each output has different features.\n"
            "  fix: remove these losses from MODEL.LOSSES.NAME"
        )


def feature_dim(cfg: CfgNode) -> int:
    """Return the width of the ``features`` that the head passes to the losses."""
    heads = cfg.MODEL.HEADS
    pooled_dim = pooled_width(heads.POOL_LAYER, cfg.MODEL.BACKBONE.FEAT_DIM)
    after = heads.NECK_FEAT == "after" or heads.NAME == "ClasHead"  # ClasHead ignores NECK_FEAT
    return (heads.EMBEDDING_DIM or pooled_dim) if after else pooled_dim
