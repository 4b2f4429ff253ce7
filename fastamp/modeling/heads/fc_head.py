"""Head of torchreid, with a fully connected layer after the pooling."""

import logging
from typing import Any

import torch
from torch import nn

from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)


@HEADS_REGISTRY.register()
class FCHead(EmbeddingHead):
    """``EmbeddingHead`` with a linear layer, batch norm and ReLU as the neck (Zhou et al. 2019, arXiv:1905.00953).

    torchreid uses the feature after the neck in the losses and in evaluation. The classifier of this head has no bias,
    in contrast to torchreid's classifier.

    Args:
        embedding_dim: output width of the linear layer.
        options: other arguments of ``EmbeddingHead``; ``with_bnneck`` and ``norm`` are ignored.

    Raises:
        ConfigError: if ``embedding_dim`` is 0, or if another argument is invalid; see ``EmbeddingHead``.
    """

    def __init__(self, *, embedding_dim: int, **options: Any) -> None:
        if embedding_dim < 1:
            raise ConfigError(
                "MODEL.HEADS.EMBEDDING_DIM is 0, but FCHead requires the width of its linear layer.\n"
                "  fix: set MODEL.HEADS.EMBEDDING_DIM, e.g. to 512 as in torchreid's OSNet"
            )
        if options.get("with_bnneck") or options.get("norm", "BN") != "BN":
            logger.warning(
                "MODEL.HEADS.WITH_BNNECK and MODEL.HEADS.NORM are ignored: FCHead always uses BatchNorm1d.\n"
                "  fix: set MODEL.HEADS.WITH_BNNECK to False and MODEL.HEADS.NORM to BN"
            )
        super().__init__(embedding_dim=embedding_dim, **options)

    def _make_neck(self, feat_dim: int, embedding_dim: int, with_bnneck: bool, norm: str) -> None:
        self.fc = nn.Sequential(nn.Linear(feat_dim, embedding_dim), nn.BatchNorm1d(embedding_dim), nn.ReLU())
        nn.init.normal_(self.fc[0].weight, std=0.01)
        nn.init.zeros_(self.fc[0].bias)

    def _neck(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.fc(pooled.flatten(1))

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert the head weights of a torchreid file, and drop the bias of the classifier."""
        return {"weight" if key == "classifier.weight" else key: value for key, value in state.items()}
