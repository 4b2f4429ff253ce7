"""Classification head."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.checkpoint.load_state import is_weight
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.utils.errors import ConfigError


@HEADS_REGISTRY.register()
class ClasHead(EmbeddingHead):
    """``EmbeddingHead`` that returns scaled class logits in evaluation mode, as in FastReID.

    As in FastReID, the losses use the feature after the neck; ``neck_feat`` is ignored. If the head is built without
    classes, for evaluation only, loading weights sets the number of classes.

    Args:
        options: arguments of ``EmbeddingHead``.

    Raises:
        ConfigError: if Partial FC divides the class centers among several processes; see also ``EmbeddingHead``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"neck_feat": "after"})
        if self.row_shards:
            raise ConfigError(
                "MODEL.HEADS.NAME ClasHead evaluates class logits, which require all class centers, but "
                "MODEL.HEADS.PFC divides them among the processes.\n"
                "  fix: set MODEL.HEADS.NAME to EmbeddingHead, or train in a single process"
            )
        self.feature_dim = len(self.weight)

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracklets: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute the outputs of ``EmbeddingHead`` in training mode, (B, K) float32 logits in evaluation mode."""
        return super().forward(features, targets, tracklets) if self.training else self.logits(features, tracklets)

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert ``state`` as ``EmbeddingHead`` does; set the number of classes of a head built without classes.

        Raises:
            WeightsError: see ``EmbeddingHead.convert_state_dict``.
        """
        state = super().convert_state_dict(state, notes)
        classes = state.get("weight")
        # A non-contiguous tensor of an untrusted file can have a shape larger than its stored data.
        is_compatible = is_weight(classes) and classes.is_contiguous() and classes.shape[1:] == self.weight.shape[1:]
        if is_compatible and len(self.weight) == 0:
            self.weight = nn.Parameter(self.weight.new_zeros(classes.shape))
            self.feature_dim = len(classes)
        return state
