"""The head that classifies in evaluation, too."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.checkpoint.load_state import is_weight
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead


@HEADS_REGISTRY.register()
class ClasHead(EmbeddingHead):
    """``EmbeddingHead`` that returns scaled class logits in evaluation, as FastReID's does.

    Also as there, the losses get the feature after the neck, whatever ``neck_feat`` says. Without classes, as for an
    evaluation alone, it takes those of the weights that it is filled with.

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

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return what ``EmbeddingHead`` does, and make room for the file's classes where there are none.

        Raises:
            WeightsError: see there.
        """
        state = super().convert_state_dict(state, notes)
        classes = state.get("weight")
        # Contiguous: as much memory as the file has, whatever its shape claims.
        is_compatible = is_weight(classes) and classes.is_contiguous() and classes.shape[1:] == self.weight.shape[1:]
        if is_compatible and len(self.weight) == 0:
            self.weight = nn.Parameter(self.weight.new_zeros(classes.shape))
            self.feature_dim = len(classes)
        return state
