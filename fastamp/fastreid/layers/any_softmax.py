"""FastReID's classification layers, which take logits or cosines instead of features and class weights."""

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers import classifier


class Linear(nn.Module):
    """Scale logits.

    Args:
        num_classes: number of classes.
        scale: factor of the logits.
        margin: margin of the target class; ignored by ``Linear``.
    """

    layer: type[classifier.Linear] = classifier.Linear

    def __init__(self, num_classes: int, scale: float, margin: float) -> None:
        super().__init__()
        self.num_classes, self.s, self.m = num_classes, scale, margin
        self._layer = self.layer(scale=scale, margin=margin)

    @force_fp32
    def forward(self, *args: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits for the loss.

        Args:
            args: (B, K) logits, cosines for the margin layers, and (B,) int64 class indices; rows with the index -1 get
                no margin. Or the three arguments of the layer in ``fastamp.layers.classifier``.

        Returns:
            (B, K) float32. With three arguments, as the layer in ``fastamp.layers.classifier``.
        """
        return self._layer(*args) if len(args) == 3 else self.with_margin(*args)

    def with_margin(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Apply the scale, and the margin of a margin layer; see ``forward``."""
        return logits * self.s

    def logits(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute (B, K) float32 logits without margin from features and class weights."""
        return self._layer.logits(features, weight)

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, scale={self.s}, margin={self.m}"


class _Margin(Linear):
    def with_margin(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Apply the margin to cosines; see ``Linear.forward``."""
        column = targets.clamp_min(0)[:, None]
        target = self._layer.right(logits.gather(1, column))
        target = torch.where(targets[:, None] < 0, logits.gather(1, column), target)
        return self.s * self._layer.wrong(logits).scatter(1, column, target)


class CosSoftmax(_Margin):
    """Additive cosine margin; see ``fastamp.layers.classifier.CosSoftmax``."""

    layer = classifier.CosSoftmax


class ArcSoftmax(_Margin):
    """Additive angular margin; see ``fastamp.layers.classifier.ArcSoftmax``."""

    layer = classifier.ArcSoftmax


class CircleSoftmax(_Margin):
    """Circle loss on class weights; see ``fastamp.layers.classifier.CircleSoftmax``."""

    layer = classifier.CircleSoftmax
