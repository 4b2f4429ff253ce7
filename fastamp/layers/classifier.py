"""Classification layers: linear and margin softmax.

All layers compute in float32 under every precision policy: a margin softmax multiplies cosines by 30 to 128, and
float16 is too coarse for logits of that magnitude (spacing 0.0156 above 16, 0.0625 above 64).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.utils.registry import Registry

CLS_LAYER_REGISTRY = Registry("MODEL.HEADS.CLS_LAYER")

# Keeps the gradient of the angle finite: its derivative is infinite at a cosine of 1, which rounding can exceed.
_COSINE_LIMIT = 1 - 1e-6


@CLS_LAYER_REGISTRY.register()
class Linear(nn.Module):
    """Linear classifier: scaled inner products of features and class weights, without bias.

    Args:
        scale (float): factor of the logits, ``MODEL.HEADS.SCALE``.
        margin (float): ``MODEL.HEADS.MARGIN``; ignored by this layer.
    """

    def __init__(self, *, scale: float, margin: float) -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin

    @force_fp32
    def forward(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits for the loss and for the accuracy.

        Args:
            features (torch.Tensor): (B, D) float.
            weight (torch.Tensor): (num_classes, D) float.
            targets (torch.Tensor): (B,) int64 class indices, used by margin layers.

        Returns:
            tuple[torch.Tensor, torch.Tensor]: (B, num_classes) float32 logits with and without margin. ``Linear``
            returns the same tensor twice.
        """
        logits = self.logits(features, weight)
        return logits, logits

    @force_fp32
    def logits(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute (B, num_classes) float32 logits without margin."""
        return F.linear(features, weight) * self.scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}, margin={self.margin}"


class MarginSoftmax(Linear):
    """Base class of margin softmax layers; subclasses override ``right`` and, optionally, ``wrong``.

    Args:
        scale (float): factor of the cosines, about 30 to 128.
        margin (float): margin of the target class.
    """

    indexes_classes = True

    @force_fp32
    def forward(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits for the loss and for the accuracy; see ``Linear.forward``."""
        cosines = self._cosines(features, weight)
        column = targets[:, None]
        with_margin = self.wrong(cosines).scatter(1, column, self.right(cosines.gather(1, column)))
        return self.scale * with_margin, self.scale * cosines

    @force_fp32
    def logits(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute (B, num_classes) float32 logits without margin."""
        return self.scale * self._cosines(features, weight)

    def _cosines(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cosines = F.linear(F.normalize(features, dim=1), F.normalize(weight, dim=1))
        return cosines.clamp(-_COSINE_LIMIT, _COSINE_LIMIT)

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        """Apply the margin to the (B, 1) float32 cosines of the target classes."""
        raise NotImplementedError

    def wrong(self, cosines: torch.Tensor) -> torch.Tensor:
        """Adjust the (B, num_classes) float32 cosines of the non-target classes. By default, return them unchanged."""
        return cosines


@CLS_LAYER_REGISTRY.register()
class CosSoftmax(MarginSoftmax):
    """CosFace: cos - m for the target class (Wang et al. 2018, arXiv:1801.09414, eq. 4)."""

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines - self.margin


@CLS_LAYER_REGISTRY.register()
class ArcSoftmax(MarginSoftmax):
    """ArcFace: cos(angle + m) for the target class, m in radians (Deng et al. 2019, arXiv:1801.07698, eq. 3).

    As in FastReID, the cosine increases again if angle + m exceeds 180 degrees.
    """

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        # cos(a + m) by the addition theorem, which needs no arc cosine.
        return cosines * math.cos(self.margin) - (1 - cosines.square()).sqrt() * math.sin(self.margin)


@CLS_LAYER_REGISTRY.register()
class CircleSoftmax(MarginSoftmax):
    """Circle loss with class weights as proxies (Sun et al. 2020, arXiv:2002.10857, eqs. 8 and 9).

    Each cosine is weighted by its distance from the optimum: max(0, 1 + m - cos) for the target class and max(0, cos +
    m) for the other classes. No gradient flows through these factors.
    """

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        return (1 + self.margin - cosines.detach()).clamp_min(0) * (cosines - (1 - self.margin))

    def wrong(self, cosines: torch.Tensor) -> torch.Tensor:
        return (cosines.detach() + self.margin).clamp_min(0) * (cosines - self.margin)
