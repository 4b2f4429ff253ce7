"""Head that classifies attributes."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.modeling.heads import HEADS_REGISTRY, EmbeddingHead


@HEADS_REGISTRY.register()
class AttrHead(EmbeddingHead):
    """Embedding head whose logits, one per attribute, are normalized by a batch norm, as in FastReID.

    Args:
        num_classes: number of attributes A.
        options: see ``EmbeddingHead``; the classification layer is not used.
    """

    def __init__(self, *, num_classes: int, **options: object) -> None:
        super().__init__(num_classes=num_classes, **options)
        self.bnneck = nn.BatchNorm1d(num_classes) if num_classes else nn.Identity()

    @force_fp32
    def forward(self, features: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor | dict:
        """Classify the attributes.

        Args:
            features: (B, feat_dim, h, w) float of any precision.
            targets: not used.

        Returns:
            In evaluation mode the probabilities (B, A) in 0..1, float32; in training mode ``{"cls_outputs": (B, A)}``,
            the logits.
        """
        logits = self.logits(features)
        return {"cls_outputs": logits, "features": logits} if self.training else logits.sigmoid()

    @force_fp32
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the logits (B, A), float32."""
        self._require_classes()
        return self.bnneck(F.linear(self._neck(self._pool(features)), self.weight))

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Keep the names of the batch norm of the logits, which an old release used for the neck."""
        bnneck = {name: value for name, value in state.items() if name.startswith("bnneck.")}
        others = {name: value for name, value in state.items() if name not in bnneck}
        return bnneck | super().convert_state_dict(others, notes)
