"""Baseline with FastReID's constructor, and losses that a subclass may override."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.fastreid.config import configurable
from fastamp.modeling.losses.build import LOSS_REGISTRY
from fastamp.modeling.losses.compute import Losses, Outputs, with_columns
from fastamp.modeling.meta_arch import baseline
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY

_MARGIN = {"margin": "margin", "gamma": "gamma", "scale": "scale"}
_SECTIONS = {
    "CrossEntropyLoss": ("ce", {"eps": "epsilon", "alpha": "alpha", "scale": "scale"}),
    "TripletLoss": (
        "tri",
        {"margin": "margin", "norm_feat": "normalize", "hard_mining": "hard_mining", "scale": "scale"},
    ),
    "CircleLoss": ("circle", _MARGIN),
    "Cosface": ("cosface", _MARGIN),
}
"""Loss -> its section in ``loss_kwargs``, and argument in FastReID -> attribute of the loss."""


class LossArguments(dict[str, Any]):
    """FastReID's ``loss_kwargs``: ``loss_names``, and the arguments of each of these losses.

    Args:
        names: ``loss_names``.
        losses: losses of the model by name, which are also stored in the attribute ``losses``.
    """

    def __init__(self, names: tuple[str, ...], losses: nn.ModuleDict) -> None:
        super().__init__(loss_names=names)
        self.losses = losses
        for loss in losses.values():
            section, arguments = _SECTIONS.get(type(loss).__name__, ("", {}))
            if section:
                self[section] = {name: getattr(loss, attribute) for name, attribute in arguments.items()}


class Baseline(baseline.Baseline):
    """Model whose constructor takes a config, or FastReID's arguments; see ``fastamp.modeling.meta_arch.Baseline``.

    Args:
        backbone, heads, pixel_mean, pixel_std: see ``fastamp.modeling.meta_arch.Baseline``.
        loss_kwargs: ``loss_names`` and the arguments of the losses. Default None: no losses.
        options: further arguments of the base class.
    """

    takes_config = True

    @configurable
    def __init__(
        self,
        *,
        backbone: nn.Module,
        heads: nn.Module,
        pixel_mean: list[float],
        pixel_std: list[float],
        loss_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        losses = _losses(loss_kwargs or {})
        super().__init__(
            backbone=backbone,
            heads=heads,
            losses=losses,
            gather=losses.gather,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            **options,
        )
        self.loss_kwargs = loss_kwargs

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL``.

        If the configured model defines ``losses``, it may compute losses that are not registered.
        """
        arguments = super().from_config(with_known_losses(cfg))
        losses = Losses(arguments.pop("losses"), gather=arguments.pop("gather"))
        return arguments | {"loss_kwargs": LossArguments(cfg.MODEL.LOSSES.NAME, losses)}

    def preprocess_image(self, batched_inputs: dict[str, Any] | torch.Tensor) -> torch.Tensor:
        """Return the normalized images of a batch, or of a tensor of images."""
        is_batch = isinstance(batched_inputs, Mapping)
        return super().preprocess_image(batched_inputs if is_batch else {"images": batched_inputs})

    def targets(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the targets on the device of the model: class labels, or any tensor for a custom method ``losses``."""
        targets = batch.get("targets")
        if not isinstance(targets, torch.Tensor) or not _has_own_losses(type(self)):
            return super().targets(batch)
        if targets.dim() == 1 and not targets.is_floating_point():
            return super().targets(batch)
        return targets.to(self.device, non_blocking=True)

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute the losses by the method ``losses``."""
        return self.losses(with_columns(outputs, batch, self._modules["losses"]), targets)

    def losses(self, outputs: Outputs, gt_labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the losses, name -> scalar float32, from the outputs of the head in training mode."""
        losses: Any = self._modules["losses"]
        computed: dict[str, torch.Tensor] = losses(outputs, gt_labels)
        return computed


def with_known_losses(cfg: CfgNode) -> Any:
    """Return a config without the losses that only a method ``losses`` of the configured model knows."""
    if not _has_own_losses(META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE)):
        return cfg
    names = (name for name in cfg.MODEL.LOSSES.NAME if name in LOSS_REGISTRY or name.startswith("pml/"))
    return cfg.with_values({"MODEL.LOSSES.NAME": tuple(names)})


def _has_own_losses(architecture: Any) -> bool:
    """Return True for a class with a method ``losses`` that is not fastamp's."""
    losses = getattr(architecture, "losses", None)
    return callable(losses) and losses.__module__.partition(".")[0] != "fastamp"


def _losses(loss_kwargs: dict[str, Any]) -> Losses:
    """Return the losses of ``loss_kwargs``, with its arguments, or build them."""
    losses = getattr(loss_kwargs, "losses", None)
    if losses is None:
        built = (LOSS_REGISTRY.get(name)() for name in loss_kwargs.get("loss_names", ()) if name in _SECTIONS)
        losses = Losses({loss.loss_name: loss for loss in built})
    for loss in losses.values():
        section, arguments = _SECTIONS.get(type(loss).__name__, ("", {}))
        values = loss_kwargs.get(section, {})
        for name in arguments.keys() & values.keys():
            setattr(loss, arguments[name], values[name])
    return losses
