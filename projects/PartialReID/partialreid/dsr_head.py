"""Head of PartialReID: a global branch, and a foreground branch that weights the places of the feature map."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers import build_norm
from fastamp.modeling.heads import HEADS_REGISTRY, EmbeddingHead
from fastamp.utils.errors import ConfigError
from partialreid.dsr_distance import pool_places


class OcclusionUnit(nn.Module):
    """Score the places of a feature map by a linear layer and a sigmoid: low for occluded places and background.

    Args:
        in_planes: channels of the feature map.
    """

    def __init__(self, in_planes: int = 2048) -> None:
        super().__init__()
        self.mask_layer = nn.Linear(in_planes, 1)

    @force_fp32
    def forward(self, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pool the maps and score the places.

        Args:
            maps: (B, C, H, W) float.

        Returns:
            ``(foreground, places, mask, scores)``: (B, C) mean of the places of the smallest pool, weighted by their
            mask; (B, C, P) places, see ``pool_places``; (B, P) mask in 0..1; and the mask with sum 1.
        """
        places, count = pool_places(maps)
        mask = torch.sigmoid(self.mask_layer(places.transpose(1, 2)).squeeze(2))
        weights = F.normalize(mask[:, :count], p=1, dim=1)
        foreground = (places[:, :, :count] @ weights[:, :, None]).squeeze(2)
        return foreground, places, mask, F.normalize(mask, p=1, dim=1)


@HEADS_REGISTRY.register()
class DSRHead(EmbeddingHead):
    """Embedding head with a second branch for the foreground (He et al. 2019, "Foreground-aware pyramid reconstruction
    for alignment-free occluded person re-identification", arXiv:1904.04975).

    Training uses the global feature and the foreground feature, each with a neck and a classifier. Evaluation returns
    the foreground feature. ``places`` also returns what the reconstruction distance needs.

    Args:
        feat_dim: channels of the feature map.
        embedding_dim: must be 0: the places have the channels of the feature map. Default 0.
        with_bnneck, norm: neck of both branches; see ``EmbeddingHead``. Default True and ``"BN"``.
        options: other arguments of ``EmbeddingHead``.

    Raises:
        ConfigError: if ``embedding_dim`` is not 0, frames are pooled, or another argument is invalid.
    """

    classifiers = ("weight", "weight_occ")
    several_outputs = True

    def __init__(
        self, *, feat_dim: int, embedding_dim: int = 0, with_bnneck: bool = True, norm: str = "BN", **options: Any
    ) -> None:
        if embedding_dim:
            raise ConfigError(
                f"MODEL.HEADS.EMBEDDING_DIM is {embedding_dim}, but DSRHead compares places of the feature map, which "
                "have MODEL.BACKBONE.FEAT_DIM channels.\n  fix: set MODEL.HEADS.EMBEDDING_DIM to 0"
            )
        super().__init__(feat_dim=feat_dim, with_bnneck=with_bnneck, norm=norm, **options)
        if self.temporal_pool is not None:
            raise ConfigError(
                "MODEL.HEADS.TEMPORAL_POOL is not supported by DSRHead.\n  fix: set MODEL.HEADS.TEMPORAL_POOL to none"
            )
        self.occ_unit = OcclusionUnit(feat_dim)
        self.bnneck_occ = nn.Sequential(*[build_norm(norm, feat_dim, freeze_bias=True)][: int(with_bnneck)])
        self.weight_occ = nn.Parameter(torch.empty_like(self.weight))
        nn.init.normal_(self.weight_occ, std=0.01)

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracklets: torch.Tensor | None = None,
    ) -> torch.Tensor | list[tuple[float, dict[str, torch.Tensor]]]:
        """Compute the foreground features, and in training mode the outputs of both branches.

        Args:
            features: (B, feat_dim, H, W) float of any precision.
            targets: (B,) int64 class labels, required in training mode.
            tracklets: not supported.

        Returns:
            In evaluation mode the foreground features (B, feat_dim), float32. In training mode ``[(1, global outputs),
            (1, foreground outputs)]``, each as in ``EmbeddingHead``.
        """
        if not self.training:
            return self.places(features)[0]
        foreground = self.occ_unit(features)[0]
        neck = self._occ_neck(foreground)
        whole = super().forward(features, targets)
        cls_outputs, logits = self.cls_layer(neck, self.weight_occ, targets)
        part = {
            "cls_outputs": cls_outputs,
            "pred_class_logits": logits,
            "features": foreground if self.neck_feat == "before" else neck,
        }
        return [(1.0, whole), (1.0, part)]

    @force_fp32
    def places(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the outputs of FastReID's ``DSRHead`` in evaluation mode.

        Args:
            features: (B, feat_dim, H, W) float of any precision.

        Returns:
            ``(features, places, scores)``: (B, feat_dim) foreground features, before or after the neck as set by
            ``eval_feat``; (B, feat_dim, P) places, not normalized; and (B, P) their scores with sum 1. All float32.
        """
        foreground, places, _, scores = self.occ_unit(features)
        return foreground if self.eval_feat == "before" else self._occ_neck(foreground), places, scores

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert the names of FastReID's first releases, whose mask layer has no bias.

        Those of its current ``DSRHead`` are the names of this head.
        """
        renamed = {}
        for name, value in super().convert_state_dict(state, notes).items():
            if name == "classifier_occ.weight":
                name = "weight_occ"
            elif name.startswith("bnneck_occ.") and not name.split(".")[1].isdigit():
                name = f"bnneck_occ.0.{name.removeprefix('bnneck_occ.')}"
            renamed[name] = value
        mask = renamed.get("occ_unit.mask_layer.weight")
        if mask is not None and "occ_unit.mask_layer.bias" not in renamed:
            renamed["occ_unit.mask_layer.bias"] = mask.new_zeros(1)
        return renamed

    def _occ_neck(self, foreground: torch.Tensor) -> torch.Tensor:
        return self.bnneck_occ(foreground[:, :, None, None]).flatten(1)
