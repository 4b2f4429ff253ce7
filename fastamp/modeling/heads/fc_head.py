"""torchreid's head: a fully connected layer behind the pooling, whose output is the feature."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers import CLS_LAYER_REGISTRY, POOL_LAYER_REGISTRY
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import pooled_to_vectors
from fastamp.utils.errors import ConfigError


@HEADS_REGISTRY.register()
class FCHead(nn.Module):
    """Pool the map, then linear layer, batch norm and ReLU, and classify that (Zhou et al. 2019, arXiv:1905.00953).

    Computed in float32 under any precision policy, see ``EmbeddingHead``. The classifier has no bias, other than
    torchreid's.

    Args:
        feat_dim: channels of the feature map.
        embedding_dim: width of the fully connected layer.
        num_classes: identities in the training set; 0 gives a head for evaluation alone.
        neck_feat, eval_feat: which feature the metric losses, and evaluation, get: "before" or "after" the layer;
            torchreid's are after it.
        pool_layer: a name in ``POOL_LAYER_REGISTRY``.
        cls_layer: a name in ``CLS_LAYER_REGISTRY``.
        scale, margin: of the classification layer.

    Raises:
        ConfigError: a part is not registered, or there is no width.
    """

    classifiers = ("weight",)

    def __init__(
        self,
        *,
        feat_dim: int,
        embedding_dim: int,
        num_classes: int,
        neck_feat: str = "after",
        eval_feat: str = "after",
        pool_layer: str = "GlobalAvgPool",
        cls_layer: str = "Linear",
        scale: float = 1,
        margin: float = 0.0,
    ) -> None:
        super().__init__()
        if embedding_dim < 1:
            raise ConfigError(
                "MODEL.HEADS.EMBEDDING_DIM is 0: FCHead needs the width of its layer.\n"
                "  fix: MODEL.HEADS.EMBEDDING_DIM 512, as in torchreid's OSNet"
            )
        self.neck_feat, self.eval_feat = neck_feat, eval_feat
        self.pool_layer = POOL_LAYER_REGISTRY.get(pool_layer)()
        self.fc = nn.Sequential(nn.Linear(feat_dim, embedding_dim), nn.BatchNorm1d(embedding_dim), nn.ReLU())
        self.weight = nn.Parameter(torch.empty(num_classes, embedding_dim))
        self.cls_layer = CLS_LAYER_REGISTRY.get(cls_layer)(scale=scale, margin=margin)
        self.feature_dim = embedding_dim
        nn.init.normal_(self.weight, std=0.01)
        nn.init.normal_(self.fc[0].weight, std=0.01)
        nn.init.zeros_(self.fc[0].bias)

    @classmethod
    def from_config(cls, cfg: Any) -> "FCHead":
        """Return the head of ``MODEL.HEADS``."""
        heads = cfg.MODEL.HEADS
        return cls(
            feat_dim=cfg.MODEL.BACKBONE.FEAT_DIM,
            embedding_dim=heads.EMBEDDING_DIM,
            num_classes=heads.NUM_CLASSES,
            neck_feat=heads.NECK_FEAT,
            eval_feat=heads.EVAL_FEAT,
            pool_layer=heads.POOL_LAYER,
            cls_layer=heads.CLS_LAYER,
            scale=heads.SCALE,
            margin=heads.MARGIN,
        )

    @force_fp32
    def forward(
        self, features: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute embeddings, and in training mode logits; see ``EmbeddingHead.forward``."""
        pooled = self._pool(features)
        if not self.training:
            return pooled if self.eval_feat == "before" else self.fc(pooled)
        self._require_classes()
        embeddings = self.fc(pooled)
        cls_outputs, logits = self.cls_layer(embeddings, self.weight, targets)
        return {
            "cls_outputs": cls_outputs,
            "pred_class_logits": logits,
            "features": pooled if self.neck_feat == "before" else embeddings,
        }

    @force_fp32
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return (B, K) float32 class logits without any margin, in every mode; see ``EmbeddingHead.logits``."""
        self._require_classes()
        return self.cls_layer.logits(self.fc(self._pool(features)), self.weight)

    def _pool(self, features: torch.Tensor) -> torch.Tensor:
        """Return (B, feat_dim)."""
        return pooled_to_vectors(self.pool_layer, features, self.fc[0].in_features)

    def _require_classes(self) -> None:
        if len(self.weight) == 0:
            raise ConfigError("MODEL.HEADS.NUM_CLASSES is 0: to train, set it to the number of identities")

    def adopt_state(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the head of a torchreid file under present names; its classifier has a bias, which is left over."""
        return {"weight" if key == "classifier.weight" else key: value for key, value in state.items()}
