"""Classification layers: what happens to the similarity of a feature with each identity's weight vector."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.utils.registry import Registry

CLS_LAYER_REGISTRY = Registry("MODEL.HEADS.CLS_LAYER")


@CLS_LAYER_REGISTRY.register()
class Linear(nn.Module):
    """Plain inner products times a scale, without a bias.

    Args:
        scale: ``MODEL.HEADS.SCALE``; logits are multiplied by it.
        margin: ``MODEL.HEADS.MARGIN``; has no meaning here.
    """

    def __init__(self, *, scale: float, margin: float) -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin

    @force_fp32
    def forward(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits for the loss and the logits for the accuracy.

        Args:
            features: (B, D) float.
            weight: (num_classes, D) float.
            targets: (B,) int64 class numbers; margin layers need them.

        Returns:
            Two (B, num_classes) float32 tensors: with the margin in, and without; the same one here.
        """
        logits = F.linear(features, weight) * self.scale
        return logits, logits

    def extra_repr(self) -> str:
        return f"scale={self.scale}, margin={self.margin}"
