"""Head without a classifier."""

from typing import Any

import torch

from fastamp.amp import force_fp32
from fastamp.modeling.heads import HEADS_REGISTRY, EmbeddingHead
from fastamp.utils.errors import ConfigError


@HEADS_REGISTRY.register()
class ClusterHead(EmbeddingHead):
    """Embedding head without a classifier, for losses that compare features with a memory.

    Args:
        options: arguments of ``EmbeddingHead``; ``num_classes`` is ignored.
    """

    classifiers = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"num_classes": 0})
        del self.weight

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracklets: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features; see ``EmbeddingHead.forward``. In training mode ``{"features": (B, D)}``."""
        pooled = self._pool_frames(features, tracklets)
        before = (self.neck_feat if self.training else self.eval_feat) == "before"
        # The neck is evaluated in training mode in any case: its statistics are part of the model.
        neck = self._neck(pooled) if self.training or not before else pooled
        head_features = pooled.flatten(1) if before else neck
        return {"features": head_features} if self.training else head_features

    def logits(self, features: torch.Tensor, tracklets: torch.Tensor | None = None) -> torch.Tensor:
        """Raise an error: there is no classifier.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "MODEL.HEADS.NAME=ClusterHead has no classifier, so that it computes no class logits.\n"
            "  fix: set MODEL.HEADS.NAME to EmbeddingHead"
        )
