"""MoCo with FastReID's constructor, and losses that a subclass may override."""

from typing import Any

import torch

from fastamp.fastreid.modeling.meta_arch.baseline import Baseline
from fastamp.modeling.losses.compute import Outputs, main_outputs
from fastamp.modeling.meta_arch import moco


class Memory(moco.MemoryBank):
    """Memory bank called as in FastReID, ``memory(features, targets)``.

    Attributes:
        keys: features of the key encoder for the images of the batch, (B, D).
    """

    keys: torch.Tensor

    def forward(self, feat_q: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Store ``keys``, and compute the loss of the features (B, D); see the base class."""
        return super().forward(feat_q, self.keys, targets)


class MoCo(Baseline, moco.MoCo):
    """MoCo whose constructor takes a config; see ``fastamp.modeling.meta_arch.MoCo``."""

    memory: Memory

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute the losses by the method ``losses``."""
        self.memory.__class__ = Memory
        self.memory.keys = self.keys(batch, targets)
        return super().loss_terms(outputs, targets, batch)

    def losses(self, outputs: Outputs, gt_labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the losses of ``Baseline`` and ``loss_mb``, the memory bank loss."""
        memory_loss = self.scale * self.memory(main_outputs(outputs)["features"], gt_labels)
        return super().losses(outputs, gt_labels) | {"loss_mb": memory_loss}
