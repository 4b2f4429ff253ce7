"""Head for a class token and part tokens (PASS, Zhu et al. 2022, arXiv:2203.03931)."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.contracts import State
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.embedding_head import EmbeddingHead
from fastamp.utils.errors import ConfigError

KEYS = (
    Key(
        "MODEL.HEADS.PART_TOKENS.FUSION",
        "cat",
        "PartTokenHead: cat: class token and mean of the part tokens side by side; mean: the mean of both.",
        choices=("cat", "mean"),
    ),
    Key(
        "MODEL.HEADS.PART_TOKENS.SEPARATE_NECKS",
        True,
        "PartTokenHead: normalize each token by a batch norm of its own; if False, one batch norm after the fusion.",
    ),
)


@HEADS_REGISTRY.register()
class PartTokenHead(EmbeddingHead):
    """Embedding head over the class token and the part tokens of a Vision Transformer.

    The feature is ``cat(g, mean(p))`` or ``(g + mean(p)) / 2``, with the class token g and the part tokens p. The neck
    normalizes each token separately, which is one batch norm over the channels of all tokens.

    Args:
        feat_dim: width D of the tokens.
        parts: number of part tokens.
        fusion: ``"cat"`` (default) or ``"mean"``.
        separate_necks: batch norm before the fusion instead of after it. Default True.
        options: see ``EmbeddingHead``; ``embedding_dim`` and ``temporal_pool`` are not supported.
    """

    def __init__(
        self, *, feat_dim: int, parts: int, fusion: str = "cat", separate_necks: bool = True, **options: Any
    ) -> None:
        fused_dim = 2 * feat_dim if fusion == "cat" else feat_dim
        super().__init__(feat_dim=(1 + parts) * feat_dim if separate_necks else fused_dim, **options)
        self.token_dim, self.fusion, self.separate_necks = feat_dim, fusion, separate_necks
        self.feature_dim, self.pooled_dim = fused_dim, (1 + parts) * feat_dim
        self.weight = nn.Parameter(torch.empty(len(self.weight), fused_dim))
        nn.init.normal_(self.weight, std=0.01)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL.HEADS``.

        Raises:
            ConfigError: if the backbone has no part tokens, or an option of the head is not supported.
        """
        heads, parts = cfg.MODEL.HEADS, cfg.MODEL.BACKBONE.PART_TOKENS
        if parts < 1:
            raise ConfigError(
                "MODEL.HEADS.NAME=PartTokenHead requires a backbone with part tokens.\n"
                "  fix: set MODEL.BACKBONE.NAME to build_vit_backbone and MODEL.BACKBONE.PART_TOKENS, e.g. to 3"
            )
        for key, value, expected in (
            ("EMBEDDING_DIM", heads.EMBEDDING_DIM, 0),
            ("TEMPORAL_POOL", heads.TEMPORAL_POOL, "none"),
        ):
            if value != expected:
                raise ConfigError(
                    f"MODEL.HEADS.{key}={value} is not supported with MODEL.HEADS.NAME=PartTokenHead.\n"
                    f"  fix: set MODEL.HEADS.{key} to {expected}"
                )
        return super().from_config(cfg) | {
            "pool_layer": "Identity",
            "parts": parts,
            "fusion": heads.PART_TOKENS.FUSION,
            "separate_necks": heads.PART_TOKENS.SEPARATE_NECKS,
        }

    def _pool(self, features: torch.Tensor) -> torch.Tensor:
        """Join the tokens: (B, D, 1 + parts, 1) -> (B, (1 + parts) * D, 1, 1)."""
        tokens = features.squeeze(3).transpose(1, 2).flatten(1)
        if tokens.shape[1] != self.pooled_dim:
            raise ConfigError(
                f"MODEL.HEADS.NAME=PartTokenHead requires {self.pooled_dim // self.token_dim} tokens of width "
                f"{self.token_dim}; found a map of {' x '.join(map(str, features.shape[1:]))}.\n"
                "  fix: set MODEL.BACKBONE.NAME to build_vit_backbone"
            )
        return tokens[:, :, None, None]

    def _fuse(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fuse joined tokens: (B, (1 + parts) * D) -> (B, feature_dim)."""
        tokens = tokens.unflatten(1, (-1, self.token_dim))
        whole, parts = tokens[:, 0], tokens[:, 1:].mean(dim=1)
        return torch.cat((whole, parts), dim=1) if self.fusion == "cat" else (whole + parts) / 2

    def _neck(self, pooled: torch.Tensor) -> torch.Tensor:
        """Apply the neck to joined tokens: (B, (1 + parts) * D, 1, 1) -> (B, feature_dim)."""
        if self.separate_necks:
            return self._fuse(self.bottleneck(pooled).flatten(1))
        return self.bottleneck(self._fuse(pooled.flatten(1))[:, :, None, None]).flatten(1)

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracklets: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute embeddings, and in training mode logits; see ``EmbeddingHead.forward``.

        Args:
            features: (B, D, 1 + parts, 1) float of any precision, the class token first.
            targets: (B,) int64 class labels, required in training mode.
            tracklets: not used.
        """
        pooled = self._pool(features)
        before = self._fuse(pooled.flatten(1))
        if not self.training and self.eval_feat == "before":
            return before
        neck = self._neck(pooled)
        if not self.training:
            return neck
        self._require_classes()
        cls_outputs, logits = self.cls_layer(neck, self.weight, targets)
        return {
            "cls_outputs": cls_outputs,
            "pred_class_logits": logits,
            "features": before if self.neck_feat == "before" else neck,
        }

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert PASS's names, with one batch norm per token: ``bottleneck.*``, ``bottleneck_1.*``, ..."""
        state = dict(state)
        number = 1 + max((int(name.split(".")[0][11:]) for name in state if name.startswith("bottleneck_")), default=0)
        if number > 1:
            for part in ("weight", "bias", "running_mean", "running_var"):
                names = [f"bottleneck.{part}", *(f"bottleneck_{index}.{part}" for index in range(1, number))]
                state[names[0]] = torch.cat([state[name] for name in names])
            state = {name: value for name, value in state.items() if not name.startswith("bottleneck_")}
        return super().convert_state_dict(state, notes)


def infer_keys(state: State, width: int) -> dict[str, str]:
    """Infer the config keys of the head from its tensors.

    Args:
        state: tensors of the head, with the names of PASS or of ``PartTokenHead``.
        width: width D of the tokens.
    """
    keys = {"MODEL.HEADS.NAME": "PartTokenHead"}
    classifier = next((state[name] for name in ("weight", "classifier.weight") if name in state), None)
    if classifier is not None and classifier.shape[1] == width:
        keys["MODEL.HEADS.PART_TOKENS.FUSION"] = "mean"
    norm = next((state[name] for name in ("bottleneck.0.weight", "bottleneck.weight") if name in state), None)
    separate = "bottleneck_1.weight" in state or (norm is not None and len(norm) > 2 * width)
    return keys | {"MODEL.HEADS.PART_TOKENS.SEPARATE_NECKS": str(separate)}
