"""The head that classifies in evaluation, too."""

from typing import Any

import torch

from fastamp.amp import force_fp32
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead


@HEADS_REGISTRY.register()
class ClasHead(EmbeddingHead):
    """``EmbeddingHead`` that returns scaled class logits in evaluation, as FastReID's does.

    Also as there, the losses get the feature after the neck, whatever ``neck_feat`` says.

    Args:
        options: of ``EmbeddingHead``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"neck_feat": "after"})
        self.feature_dim = len(self.weight)

    @force_fp32
    def forward(
        self, features: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute class logits: in training mode what ``EmbeddingHead`` returns, in evaluation mode (B, K) float32."""
        return super().forward(features, targets) if self.training else self.logits(features)
