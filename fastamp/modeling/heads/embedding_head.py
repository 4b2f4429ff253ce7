"""The head of the strong baselines: pooling, reduction, BNNeck, classifier."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers import CLS_LAYER_REGISTRY, POOL_LAYER_REGISTRY, build_norm
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.utils.errors import ConfigError, WeightsError
from fastamp.utils.moved import renamed_attribute


@HEADS_REGISTRY.register()
class EmbeddingHead(nn.Module):
    """Pool the map, reduce it, normalize it with a BNNeck, and classify it (Luo et al. 2019, arXiv:1903.07071).

    Computed in float32 under any precision policy: it is a fraction of a per cent of the backbone's work, and its
    output is what distances are made of.

    Args:
        feat_dim: channels of the feature map; with ``Flatten`` its channels x height x width.
        embedding_dim: width after a 1x1 convolution; 0 for none.
        num_classes: identities in the training set; 0 gives a head for evaluation alone.
        neck_feat: which feature the metric losses get: "before" or "after" the neck.
        eval_feat: which one evaluation gets.
        pool_layer: a name in ``POOL_LAYER_REGISTRY``.
        cls_layer: a name in ``CLS_LAYER_REGISTRY``.
        scale, margin: of the classification layer.
        with_bnneck: batch normalization, with a bias frozen at 0, before the classifier.
        norm: the neck's normalization layer.

    Raises:
        ConfigError: a part is not registered, or ``neck_feat`` is something else.
    """

    classifiers = ("weight",)

    def __init__(
        self,
        *,
        feat_dim: int,
        embedding_dim: int = 0,
        num_classes: int,
        neck_feat: str = "before",
        eval_feat: str = "after",
        pool_layer: str = "GlobalAvgPool",
        cls_layer: str = "Linear",
        scale: float = 1,
        margin: float = 0.0,
        with_bnneck: bool = True,
        norm: str = "BN",
    ) -> None:
        super().__init__()
        if neck_feat not in ("before", "after"):
            raise ConfigError(f"MODEL.HEADS.NECK_FEAT: {neck_feat!r} is unknown; choices: before, after")
        self.neck_feat, self.eval_feat = neck_feat, eval_feat
        self.pooled_dim = feat_dim
        self.pool_layer = POOL_LAYER_REGISTRY.get(pool_layer)()
        self._make_neck(feat_dim, embedding_dim, with_bnneck, norm)
        self.feature_dim = embedding_dim or feat_dim
        self.weight = nn.Parameter(torch.empty(num_classes, self.feature_dim))
        self.cls_layer = CLS_LAYER_REGISTRY.get(cls_layer)(scale=scale, margin=margin)
        nn.init.normal_(self.weight, std=0.01)

    @classmethod
    def from_config(cls, cfg: Any) -> "EmbeddingHead":
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
            with_bnneck=heads.WITH_BNNECK,
            norm=heads.NORM,
        )

    def _make_neck(self, feat_dim: int, embedding_dim: int, with_bnneck: bool, norm: str) -> None:
        """Set up what ``_neck`` computes."""
        neck: list[nn.Module] = []
        if embedding_dim > 0:
            neck.append(nn.Conv2d(feat_dim, embedding_dim, 1, bias=False))
            nn.init.kaiming_normal_(neck[0].weight, mode="fan_out")
        if with_bnneck:
            neck.append(build_norm(norm, embedding_dim or feat_dim, freeze_bias=True))
        self.bottleneck = nn.Sequential(*neck)

    def _neck(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map (B, feat_dim, 1, 1) to (B, D)."""
        return self.bottleneck(pooled).flatten(1)

    @force_fp32
    def forward(
        self, features: torch.Tensor, targets: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute embeddings, and in training mode logits.

        Args:
            features: (B, feat_dim, h, w) float of any precision.
            targets: (B,) int64 class numbers, needed in training mode.

        Returns:
            In evaluation mode (B, D) float32, the feature after the neck, or by ``eval_feat`` before it, not
            normalized. In training mode
            ``{"cls_outputs": (B, K), "pred_class_logits": (B, K), "features": (B, D)}``, float32; the features are
            those before or after the neck, by ``neck_feat``.
        """
        pooled = self._pool(features)
        if not self.training and self.eval_feat == "before":
            return pooled.flatten(1)
        neck = self._neck(pooled)
        if not self.training:
            return neck
        self._require_classes()
        cls_outputs, logits = self.cls_layer(neck, self.weight, targets)
        return {
            "cls_outputs": cls_outputs,
            "pred_class_logits": logits,
            "features": pooled.flatten(1) if self.neck_feat == "before" else neck,
        }

    @force_fp32
    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return the class logits without any margin, scaled, of a map of features, in every mode.

        Args:
            features: (B, feat_dim, h, w) float of any precision.

        Returns:
            (B, K) float32.
        """
        self._require_classes()
        return self.cls_layer.logits(self._neck(self._pool(features)), self.weight)

    def _pool(self, features: torch.Tensor) -> torch.Tensor:
        """Return (B, feat_dim, 1, 1)."""
        pooled = self.pool_layer(features)
        if pooled.dim() == 2:
            pooled = pooled[:, :, None, None]
        if pooled.shape[1] != self.pooled_dim:
            raise ConfigError(
                f"MODEL.HEADS.POOL_LAYER {type(self.pool_layer).__name__} makes {pooled.shape[1]} values of a map of "
                f"{' x '.join(map(str, features.shape[1:]))}; the head was built for {self.pooled_dim} "
                "values, those of the images that the config describes"
            )
        if pooled.shape[2:] != (1, 1):
            size = " x ".join(map(str, pooled.shape[2:]))
            raise ConfigError(
                f"MODEL.HEADS.POOL_LAYER {type(self.pool_layer).__name__} leaves a map of {size}; the head needs 1 x 1"
            )
        return pooled

    def _require_classes(self) -> None:
        if len(self.weight) == 0:
            raise ConfigError("MODEL.HEADS.NUM_CLASSES is 0: to train, set it to the number of identities")

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the head of a FastReID file of any age, or of a TransReID one without JPM, under present names.

        Raises:
            WeightsError: it is FastReID v0.1.1's ReductionHead, which computes another function.
        """
        if any(key.startswith("bnneck.") for key in state) and any(key.startswith("bottleneck.") for key in state):
            raise WeightsError(
                "the weights have FastReID v0.1.1's ReductionHead (a reduction with its own batch norm before the "
                "neck), which is another function than EmbeddingHead's.\n"
                "  fix: take weights of a later FastReID, or train again; as a start for the backbone alone the file "
                "can be named in MODEL.BACKBONE.PRETRAIN_PATH"
            )
        has_fc = any(key.startswith("fc.0.") for key in state)  # torchvision's fc. is its classifier
        if has_fc:
            notes.append(
                "torchreid's features come after its fc layer, which MODEL.HEADS.NAME EmbeddingHead does not have: "
                "set MODEL.HEADS.NAME FCHead for them"
            )
        if any(key.startswith("b1.") for key in state):
            notes.append(
                "TransReID trained the copies of the last block in its JPM, not the backbone's own, which is what "
                "MODEL.HEADS.NAME EmbeddingHead takes: set MODEL.HEADS.NAME JPMHead for its features"
            )
        number = len(self.bottleneck) - 1  # of the batch norm
        renamed = {}
        for key, value in state.items():
            if key == "classifier.weight" and not has_fc:
                key = "weight"
            elif key.startswith("bnneck."):
                key = f"bottleneck.{number}.{key.removeprefix('bnneck.')}"
            elif key.startswith("bottleneck.") and not key.split(".")[1].isdigit():
                key = f"bottleneck.{number}.{key.removeprefix('bottleneck.')}"
            renamed[key] = value
        return renamed

    adopt_state = renamed_attribute("adopt_state", "convert_state_dict")
