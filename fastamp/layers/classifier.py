"""Classification layers: what happens to the similarity of a feature with each identity's weight vector.

All compute in float32 under any precision policy: a margin softmax multiplies cosines by 30 to 128, where the steps of
float16 are 0.06 and more.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.utils.registry import Registry

CLS_LAYER_REGISTRY = Registry("MODEL.HEADS.CLS_LAYER")

# Keeps the angle's gradient finite: at a cosine of 1 its derivative is infinite, and rounding gives cosines above 1.
_COSINE_LIMIT = 1 - 1e-6


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
        logits = self.logits(features, weight)
        return logits, logits

    @force_fp32
    def logits(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return (B, num_classes) float32 logits without any margin."""
        return F.linear(features, weight) * self.scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}, margin={self.margin}"


class MarginSoftmax(Linear):
    """A margin on the cosines of features with weights; a subclass says how it changes them.

    Args:
        scale: cosines are multiplied by it; about 30 to 128.
        margin: of the right class.
    """

    @force_fp32
    def forward(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits for the loss and the logits for the accuracy; see ``Linear.forward``."""
        cosines = self._cosines(features, weight)
        column = targets[:, None]
        with_margin = self.wrong(cosines).scatter(1, column, self.right(cosines.gather(1, column)))
        return self.scale * with_margin, self.scale * cosines

    @force_fp32
    def logits(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return (B, num_classes) float32 logits without any margin."""
        return self.scale * self._cosines(features, weight)

    def _cosines(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cosines = F.linear(F.normalize(features, dim=1), F.normalize(weight, dim=1))
        return cosines.clamp(-_COSINE_LIMIT, _COSINE_LIMIT)

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        """Return what becomes of (B, 1) float32 cosines with the right class."""
        raise NotImplementedError

    def wrong(self, cosines: torch.Tensor) -> torch.Tensor:
        """Return what becomes of (B, K) float32 cosines with the other classes: nothing, unless a subclass says so."""
        return cosines


@CLS_LAYER_REGISTRY.register()
class CosSoftmax(MarginSoftmax):
    """cos - m for the right class (CosFace, Wang et al. 2018, arXiv:1801.09414, eq. 4)."""

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines - self.margin


@CLS_LAYER_REGISTRY.register()
class ArcSoftmax(MarginSoftmax):
    """cos(angle + m), m in radians, for the right class (ArcFace, Deng et al. 2019, arXiv:1801.07698, eq. 3).

    As in FastReID the cosine rises again where angle + m is beyond 180 degrees.
    """

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        # cos(a + m) by the addition theorem: no arc cosine.
        return cosines * math.cos(self.margin) - (1 - cosines.square()).sqrt() * math.sin(self.margin)


@CLS_LAYER_REGISTRY.register()
class CircleSoftmax(MarginSoftmax):
    """Circle loss with class weights as proxies (Sun et al. 2020, arXiv:2002.10857, eqs. 8 and 9).

    Each cosine is weighed by its own distance from the optimum: 1 + m - cos for the right class, cos + m, if that is
    positive, for the others; no gradient flows through these weights.
    """

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        return (1 + self.margin - cosines.detach()).clamp_min(0) * (cosines - (1 - self.margin))

    def wrong(self, cosines: torch.Tensor) -> torch.Tensor:
        return (cosines.detach() + self.margin).clamp_min(0) * (cosines - self.margin)
