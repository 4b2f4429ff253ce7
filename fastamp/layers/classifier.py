"""Classification layers: linear and margin softmax.

All layers compute in float32 under every precision policy: a margin softmax multiplies cosines by 30 to 128, and
float16 is too coarse for logits of that magnitude (spacing 0.0156 above 16, 0.0625 above 64).
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode
from fastamp.config.key import Key
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry

KEYS = (
    Key(
        "MODEL.HEADS.SUBCENTERS.NUMBER",
        2,
        "SubCenterArcSoftmax: number of centers of each class, of which the nearest counts.",
        low=1,
    ),
    Key(
        "MODEL.HEADS.SUBCENTERS.MIN_MARGIN",
        0.2,
        "SubCenterArcSoftmax: margin in radians of the class with the most images. The class with the fewest has "
        "MODEL.HEADS.MARGIN; equal values give all classes the same margin.",
        low=0,
    ),
    Key(
        "MODEL.HEADS.FILTER_ABOVE",
        1.0,
        "Margin softmax: replace the cosines of wrong classes above this value with 0, as insightface's inter-class "
        "filtering does: with wrong labels, several classes are one identity. 1 filters nothing.",
        low=0,
        high=1,
    ),
)


class ClassificationLayer(Protocol):
    """Classification layer, an ``nn.Module``; see ``Linear.forward``.

    Attributes:
        centers: number of weight vectors of each class, in consecutive rows of the weight. Default 1.
        margin_per_class: whether Partial FC passes the class of each row as ``classes``. Default False.
    """

    centers: int = 1
    margin_per_class: bool = False

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments besides ``scale`` and ``margin``. Default: none."""
        return {}


CLS_LAYER_REGISTRY = Registry("MODEL.HEADS.CLS_LAYER", contract=ClassificationLayer)

# Keeps the gradient of the angle finite: its derivative is infinite at a cosine of 1, which rounding can exceed.
_COSINE_LIMIT = 1 - 1e-6


@CLS_LAYER_REGISTRY.register()
class Linear(nn.Module, ClassificationLayer):
    """Linear classifier: scaled inner products of features and class weights, without bias.

    Args:
        scale: factor of the logits, ``MODEL.HEADS.SCALE``.
        margin: ``MODEL.HEADS.MARGIN``; ignored by this layer.
    """

    def __init__(self, *, scale: float, margin: float) -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin

    def set_class_counts(self, counts: Sequence[int] | np.ndarray) -> None:
        """Set the number of training images of each class, (num_classes,); ignored unless a subclass uses it."""

    @force_fp32
    def forward(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits for the loss and for the accuracy.

        Args:
            features: (B, D) float.
            weight: (num_classes * centers, D) float.
            targets: (B,) int64 class indices, used by margin layers; -1 for an image whose class is not among those of
                ``weight`` (Partial FC), and which gets no margin.

        Returns:
            (B, num_classes) float32 logits with and without margin. ``Linear`` returns the same tensor twice.
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
        scale: factor of the cosines, about 30 to 128.
        margin: margin of the target class.
        filter_above: cosines of wrong classes above this value become 0 in the loss, without gradient. Default 1: none.
    """

    indexes_classes = True

    def __init__(self, *, scale: float, margin: float, filter_above: float = 1.0) -> None:
        super().__init__(scale=scale, margin=margin)
        self.filter_above = filter_above

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return ``filter_above``, from ``MODEL.HEADS.FILTER_ABOVE``."""
        return {"filter_above": cfg.MODEL.HEADS.FILTER_ABOVE}

    @force_fp32
    def forward(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits for the loss and for the accuracy; see ``Linear.forward``."""
        cosines = self._cosines(features, weight)
        wrong, right = self.wrong(self._filter(cosines)), self.right(_at(cosines, targets))
        return self.scale * _replace_target(wrong, targets, right), self.scale * cosines

    @force_fp32
    def logits(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute (B, num_classes) float32 logits without margin."""
        return self.scale * self._cosines(features, weight)

    def _cosines(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cosines = F.linear(F.normalize(features, dim=1), F.normalize(weight, dim=1))
        return cosines.clamp(-_COSINE_LIMIT, _COSINE_LIMIT)

    def _filter(self, cosines: torch.Tensor) -> torch.Tensor:
        """Replace the cosines above ``filter_above`` with 0; the target classes are replaced later."""
        return cosines.masked_fill(cosines > self.filter_above, 0) if self.filter_above < 1 else cosines

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        """Apply the margin to the (B, 1) float32 cosines of the target classes."""
        raise NotImplementedError

    def wrong(self, cosines: torch.Tensor) -> torch.Tensor:
        """Adjust the (B, num_classes) float32 cosines of the non-target classes. By default, return them unchanged."""
        return cosines

    def extra_repr(self) -> str:
        filtered = f", filter_above={self.filter_above}" if self.filter_above < 1 else ""
        return super().extra_repr() + filtered


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
class DetachedArcSoftmax(ArcSoftmax):
    """ArcFace with the gradient of the cosine: the margin is added without gradient, as in insightface.

    Loss and logits are those of ``ArcSoftmax``, but insightface's program computes the angle and its cosine outside of
    the autograd graph. The derivative of the target's logit with respect to its cosine is then 1 instead of
    sin(angle + m) / sin(angle), so the gradient of the loss is that of a softmax without margin at the same
    probabilities.
    """

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines + (super().right(cosines) - cosines).detach()


@CLS_LAYER_REGISTRY.register()
class MonotonicArcSoftmax(MarginSoftmax):
    """ArcFace that decreases with every angle: cos - m sin(m) for the target class if angle + m exceeds 180 degrees.

    Deng et al. 2019, arXiv:1801.07698, eq. 3, with the linear continuation of the authors' program, so that the
    gradient always brings the feature nearer to its class. ``ArcSoftmax`` has no such continuation.
    """

    def right(self, cosines: torch.Tensor) -> torch.Tensor:
        return _add_angle(cosines, torch.full_like(cosines, self.margin))


@CLS_LAYER_REGISTRY.register()
class SubCenterArcSoftmax(MarginSoftmax):
    """Sub-center ArcFace with a margin for each class that depends on its number of images.

    Each class has several centers, and its cosine is that of the nearest one (Deng et al. 2020, "Sub-center ArcFace"),
    which separates wrong labels and views such as the left and right flank. The margin of a class with n images is
    linear in n^(-1/4), from ``min_margin`` for the largest class to ``margin`` for the smallest (Ha et al. 2020,
    arXiv:2010.05350). As in ``MonotonicArcSoftmax``, the target's logit decreases with every angle.

    Until ``set_class_counts`` is called, which ``DefaultTrainer`` does, and if all classes have the same number of
    images, the margin of all classes is ``margin``.

    Args:
        scale: factor of the cosines.
        margin: largest margin, in radians.
        min_margin: smallest margin, in radians. Default 0.2.
        centers: centers of each class. Default 2.
        num_classes: number of classes; 0 (default) for evaluation only.
        filter_above: see ``MarginSoftmax``. Default 1.

    Raises:
        ConfigError: if ``min_margin`` is larger than ``margin``.
    """

    classifiers = ("margins",)
    margin_per_class = True
    margins: torch.Tensor

    def __init__(
        self,
        *,
        scale: float,
        margin: float,
        min_margin: float = 0.2,
        centers: int = 2,
        num_classes: int = 0,
        filter_above: float = 1.0,
    ) -> None:
        super().__init__(scale=scale, margin=margin, filter_above=filter_above)
        if min_margin > margin:
            raise ConfigError(
                f"MODEL.HEADS.SUBCENTERS.MIN_MARGIN is {min_margin:g}, but MODEL.HEADS.MARGIN is {margin:g}; expected "
                "a margin that is at least as large.\n  fix: set MODEL.HEADS.MARGIN, e.g. to 0.5"
            )
        self.min_margin, self.centers = min_margin, centers
        self.register_buffer("margins", torch.full((num_classes,), float(margin)))

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the options in ``MODEL.HEADS``."""
        heads = cfg.MODEL.HEADS
        return super().further_options(cfg) | {
            "min_margin": heads.SUBCENTERS.MIN_MARGIN,
            "centers": heads.SUBCENTERS.NUMBER,
            "num_classes": heads.NUM_CLASSES,
        }

    def set_class_counts(self, counts: Sequence[int] | np.ndarray) -> None:
        """Compute the margin of each class from its number of training images, (num_classes,), at least 1 each."""
        rarity = torch.as_tensor(np.asarray(counts), dtype=torch.float64).clamp_min(1).pow(-0.25)
        low, high = rarity.min(), rarity.max()
        position = (rarity - low) / (high - low) if high > low else torch.ones_like(rarity)
        self.margins.copy_(self.min_margin + (self.margin - self.min_margin) * position)

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        classes: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits for the loss and for the accuracy; see ``Linear.forward``.

        Args:
            features, weight, targets: see ``Linear.forward``.
            classes: (K,) int64, class of each entry of ``weight``, for Partial FC. Default None: all classes in order.
        """
        cosines = self._cosines(features, weight)
        margins = (self.margins if classes is None else self.margins[classes])[targets.clamp_min(0)]
        right = _add_angle(_at(cosines, targets), margins[:, None])
        return self.scale * _replace_target(self._filter(cosines), targets, right), self.scale * cosines

    def _cosines(self, features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cosines = super()._cosines(features, weight)
        return cosines.view(len(features), -1, self.centers).amax(2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, min_margin={self.min_margin}, centers={self.centers}"


def _at(cosines: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the (B, 1) cosines of the target classes; any cosine of the row for the target -1."""
    return cosines.gather(1, targets.clamp_min(0)[:, None])


def _replace_target(cosines: torch.Tensor, targets: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Replace the cosines of the target classes with ``right`` (B, 1), except in rows with the target -1."""
    column = targets.clamp_min(0)[:, None]
    return cosines.scatter(1, column, torch.where(targets[:, None] >= 0, right, cosines.gather(1, column)))


def _add_angle(cosines: torch.Tensor, margins: torch.Tensor) -> torch.Tensor:
    """Compute cos(angle + m) by the addition theorem; cos(angle) - m sin(m) if angle + m exceeds 180 degrees."""
    added = cosines * margins.cos() - (1 - cosines.square()).sqrt() * margins.sin()
    return torch.where(cosines > -margins.cos(), added, cosines - margins * margins.sin())


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
