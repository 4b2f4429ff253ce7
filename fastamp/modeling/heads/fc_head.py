"""torchreid's head: a fully connected layer behind the pooling, whose output is the feature."""

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
    """``EmbeddingHead`` whose neck is a linear layer, batch norm and ReLU (Zhou et al. 2019, arXiv:1905.00953).

    torchreid gives the feature after it to the losses and to evaluation. The classifier has no bias, other than
    torchreid's.

    Args:
        embedding_dim: width of the layer.
        options: of ``EmbeddingHead``; its ``with_bnneck`` and ``norm`` have no meaning here.

    Raises:
        ConfigError: there is no width; see also ``EmbeddingHead``.
    """

    def __init__(self, *, embedding_dim: int, **options: Any) -> None:
        if embedding_dim < 1:
            raise ConfigError(
                "MODEL.HEADS.EMBEDDING_DIM is 0: FCHead needs the width of its layer.\n"
                "  fix: MODEL.HEADS.EMBEDDING_DIM 512, as in torchreid's OSNet"
            )
        if options.get("with_bnneck") or options.get("norm", "BN") != "BN":
            logger.warning("MODEL.HEADS.WITH_BNNECK and NORM do nothing: FCHead has torchreid's BatchNorm1d")
        super().__init__(embedding_dim=embedding_dim, **options)

    def _make_neck(self, feat_dim: int, embedding_dim: int, with_bnneck: bool, norm: str) -> None:
        self.fc = nn.Sequential(nn.Linear(feat_dim, embedding_dim), nn.BatchNorm1d(embedding_dim), nn.ReLU())
        nn.init.normal_(self.fc[0].weight, std=0.01)
        nn.init.zeros_(self.fc[0].bias)

    def _neck(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.fc(pooled.flatten(1))

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the head of a torchreid file under present names; its classifier has a bias, which is left over."""
        return {"weight" if key == "classifier.weight" else key: value for key, value in state.items()}
