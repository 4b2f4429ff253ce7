"""Head with an embedding and a matcher of feature maps, and the model that evaluates both."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from domaingeneralization.matcher import QAConv
from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.modeling.heads import HEADS_REGISTRY, EmbeddingHead
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils.errors import ConfigError

KEYS = (
    Key(
        "MODEL.HEADS.MATCHING.SIZE",
        [24, 8],
        "QAConvHead: height and width of the feature maps that are matched; others are pooled to this size.",
        length=2,
        low=1,
    ),
    Key("MODEL.HEADS.MATCHING.CHANNELS", 128, "QAConvHead: channels of the feature maps that are matched.", low=1),
)


@HEADS_REGISTRY.register()
class QAConvHead(EmbeddingHead):
    """Embedding head with a second branch: a 3x3 convolution, batch norm, and ``QAConv`` on maps of unit length.

    The embedding selects the candidates in evaluation, and the matcher ranks them; see ``MatchingEvaluator``.

    Args:
        feat_dim: channels of the feature map.
        size: height and width of the maps that are matched.
        channels: channels of these maps.
        options: other arguments of ``EmbeddingHead``.

    Raises:
        ConfigError: if frames are pooled.
    """

    def __init__(self, *, feat_dim: int, size: Any = (24, 8), channels: int = 128, **options: Any) -> None:
        super().__init__(feat_dim=feat_dim, **options)
        if self.temporal_pool is not None:
            raise ConfigError(
                "MODEL.HEADS.TEMPORAL_POOL is not supported by QAConvHead.\n"
                "  fix: set MODEL.HEADS.TEMPORAL_POOL to none"
            )
        self.size = tuple(size)
        self.reduce = nn.Sequential(nn.Conv2d(feat_dim, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        nn.init.kaiming_normal_(self.reduce[0].weight, mode="fan_out")
        self.matcher = QAConv(self.size[0] * self.size[1])

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL.HEADS``."""
        keys = cfg.MODEL.HEADS.MATCHING
        return super().from_config(cfg) | {"size": keys.SIZE, "channels": keys.CHANNELS}

    @force_fp32
    def maps(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the maps for the matcher: (B, feat_dim, H, W) -> (B, channels, h, w), unit length at each place."""
        return F.normalize(self.reduce(F.adaptive_avg_pool2d(features, self.size)), dim=1)

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracklets: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute embeddings; see ``EmbeddingHead.forward``. In training mode also ``matching_scores`` (B, B)."""
        outputs = super().forward(features, targets)
        if not self.training:
            return outputs
        maps = self.maps(features)
        return outputs | {"matching_scores": self.matcher(maps, maps)}


@META_ARCH_REGISTRY.register()
class MatchingBaseline(Baseline):
    """``Baseline`` with ``QAConvHead``, evaluated with its matcher (``MatchingEvaluator``).

    Args:
        options: arguments of ``Baseline``.

    Raises:
        ConfigError: if the head has no matcher.
    """

    evaluator = "MatchingEvaluator"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(self.heads, QAConvHead):
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE=MatchingBaseline requires QAConvHead, got {type(self.heads).__name__}.\n"
                "  fix: set MODEL.HEADS.NAME to QAConvHead"
            )

    def features_and_maps(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the features (B, D) and the maps (B, C, h, w) of a batch in evaluation mode."""
        features = self.feature_maps(self.as_batch(batch))
        return self.heads(features), self.heads.maps(features)
