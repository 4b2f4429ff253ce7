"""MGN with FastReID's constructor, and losses that a subclass may override."""

from typing import Any

import torch

from fastamp.config import CfgNode
from fastamp.fastreid.config import configurable
from fastamp.fastreid.modeling.meta_arch.baseline import LossArguments, with_known_losses
from fastamp.modeling.losses.compute import Outputs
from fastamp.modeling.meta_arch import mgn

_HEADS = ("b1", "b2", "b21", "b22", "b3", "b31", "b32", "b33")
"""Heads in the order of the arguments of ``losses``."""


class MGN(mgn.MGN):
    """MGN whose constructor takes a config; see ``fastamp.modeling.meta_arch.MGN``.

    Args:
        loss_kwargs: see ``Baseline``. Default None.
        parts: arguments of the base class.
    """

    takes_config = True

    @configurable
    def __init__(self, *, loss_kwargs: dict[str, Any] | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self.loss_kwargs = loss_kwargs

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL``; see ``Baseline.from_config``."""
        arguments = super().from_config(with_known_losses(cfg))
        return arguments | {"loss_kwargs": LossArguments(cfg.MODEL.LOSSES.NAME, arguments["losses"])}

    def loss_terms(self, outputs: dict[str, Outputs], targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the losses by the method ``losses``."""
        return self.losses(*(outputs[name] for name in _HEADS), targets)

    def losses(self, *outputs_and_labels: Any) -> dict[str, torch.Tensor]:
        """Compute the losses, name -> scalar float32.

        Args:
            outputs_and_labels: outputs of the heads b1, b2, b21, b22, b3, b31, b32 and b33, and (B,) int64 labels.
        """
        *outputs, gt_labels = outputs_and_labels
        return super().loss_terms(dict(zip(_HEADS, outputs, strict=True)), gt_labels)
