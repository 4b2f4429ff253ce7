"""Head with pooling, reduction, BNNeck and classifier."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode
from fastamp.contracts import Head
from fastamp.layers import CLS_LAYER_REGISTRY, POOL_LAYER_REGISTRY, PartialFC, build_norm, pooled_width
from fastamp.layers.pooling import GeneralizedMeanPooling
from fastamp.modeling.heads.build import HEADS_REGISTRY
from fastamp.modeling.heads.temporal_pool import TEMPORAL_POOLS
from fastamp.utils.errors import ConfigError, WeightsError
from fastamp.utils.sharding import RowShard

PUBLISHED_EXPONENTS = {"global_pool.p", "gap.p"}
"""Names of the learned exponent of the pooling in files of AGW and cluster-contrast."""
_EXPONENT_TOLERANCE = 1e-3  # learned exponents nearer to the fixed one give the same features


def classifier_options(cfg: CfgNode) -> dict[str, Any]:
    """Return the options of ``MODEL.HEADS.CLS_LAYER`` besides scale and margin."""
    options: dict[str, Any] = CLS_LAYER_REGISTRY.get(cfg.MODEL.HEADS.CLS_LAYER).further_options(cfg)
    return options


def partial_fc_options(cfg: CfgNode) -> dict[str, Any]:
    """Return the arguments of a head for ``MODEL.HEADS.PFC``; {} if it is not enabled, or if there are no classes.

    Raises:
        ConfigError: if a loss or option in the config requires the logits of all classes.
    """
    heads, losses = cfg.MODEL.HEADS, cfg.MODEL.LOSSES
    if not heads.PFC.ENABLED or heads.NUM_CLASSES == 0:
        return {}
    conflicts = ["MODEL.LOSSES.NAME FocalLoss"] if "FocalLoss" in losses.NAME else []
    if losses.CE.EPSILON != 0 and "CrossEntropyLoss" in losses.NAME:
        conflicts.append(f"MODEL.LOSSES.CE.EPSILON {losses.CE.EPSILON:g} (label smoothing)")
    if conflicts:
        raise ConfigError(
            f"MODEL.HEADS.PFC.ENABLED: {' and '.join(conflicts)} requires the logits of all classes, but Partial FC "
            "divides them among the processes and samples them.\n"
            "  fix: use CrossEntropyLoss with MODEL.LOSSES.CE.EPSILON 0, or set MODEL.HEADS.PFC.ENABLED False"
        )
    return {"sample_rate": heads.PFC.SAMPLE_RATE, "sample_seed": cfg.SEED}


@HEADS_REGISTRY.register()
class EmbeddingHead(nn.Module, Head):
    """Embedding head with pooling, 1x1 convolution, BNNeck and classifier (Luo et al. 2019, arXiv:1903.07071).

    The head computes in float32 under any precision policy, because distances are computed from the embeddings, and the
    head needs less than 1 % of the backbone's time.

    Args:
        feat_dim: channels of the feature map; with ``Flatten`` channels x height x width.
        embedding_dim: output channels of the 1x1 convolution. Default 0: no convolution.
        num_classes: number of identities in the training set; 0 builds a head for evaluation only.
        neck_feat: feature for the metric losses: ``"before"`` (default) or ``"after"`` the neck.
        eval_feat: feature returned in evaluation mode: ``"before"`` or ``"after"`` (default) the neck.
        pool_layer: name in ``POOL_LAYER_REGISTRY``. Default ``"GlobalAvgPool"``.
        cls_layer: name in ``CLS_LAYER_REGISTRY``. Default ``"Linear"``.
        scale, margin: scale and margin of the classification layer. Default 1 and 0.
        with_bnneck: add batch norm before the classifier. Default True.
        neck_bias: train the bias of this batch norm, instead of freezing it at 0. Default False.
        norm: name of the normalization layer of the neck. Default ``"BN"``.
        cls_options: further options of the classification layer. Default None: no options.
        temporal_pool: pooling of the frames of a tracklet, between the spatial pooling and the neck: ``"avg"``,
            ``"attention"``, or ``"none"`` (default) for images.
        frames: frames per tracklet in training mode, for ``temporal_pool``. Default 1.
        sample_rate: with Partial FC, fraction of the class centers in each step, in (0, 1]; the head then holds only
            the class centers of this rank. Default None: no Partial FC.
        sample_seed: seed of the sampling of Partial FC. Default 0.

    Attributes:
        row_shards: with Partial FC and several processes, the rows of ``weight`` on this rank.

    Raises:
        ConfigError: if a component is not registered, or if ``neck_feat`` is unknown; see also ``PartialFC``.
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
        neck_bias: bool = False,
        norm: str = "BN",
        cls_options: dict[str, Any] | None = None,
        temporal_pool: str = "none",
        frames: int = 1,
        sample_rate: float | None = None,
        sample_seed: int = 0,
    ) -> None:
        super().__init__()
        if neck_feat not in ("before", "after"):
            raise ConfigError(f"MODEL.HEADS.NECK_FEAT: unknown value {neck_feat!r}; choices: before, after")
        self.neck_feat, self.eval_feat, self.neck_bias = neck_feat, eval_feat, neck_bias
        self.pooled_dim = pooled_width(pool_layer, feat_dim)
        self.pool_layer = POOL_LAYER_REGISTRY.get(pool_layer)()
        self._make_neck(self.pooled_dim, embedding_dim, with_bnneck, norm)
        self.feature_dim = embedding_dim or self.pooled_dim
        self.cls_layer = CLS_LAYER_REGISTRY.get(cls_layer)(scale=scale, margin=margin, **(cls_options or {}))
        centers = self.cls_layer.centers
        self.partial_fc, self.row_shards, rows = None, {}, num_classes * centers
        if sample_rate is not None:
            self.partial_fc = PartialFC(
                num_classes=num_classes, sample_rate=sample_rate, centers=centers, seed=sample_seed
            )
            rows = self.partial_fc.count * centers
            if rows < num_classes * centers:
                self.row_shards = {"weight": RowShard(self.partial_fc.start * centers, num_classes * centers)}
        self.weight = nn.Parameter(torch.empty(rows, self.feature_dim))
        # The ranks need different rows even if their global generators have the same seed.
        generator = self.partial_fc.generator(self.weight.device) if self.row_shards else None
        nn.init.normal_(self.weight, std=0.01, generator=generator)
        self.temporal_pool, self.frames = None, 0
        if temporal_pool != "none":
            self.frames = frames
            self.temporal_pool = TEMPORAL_POOLS[temporal_pool](self.pooled_dim, frames=frames)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL.HEADS``."""
        heads, temporal = cfg.MODEL.HEADS, {}
        if heads.TEMPORAL_POOL != "none":
            temporal = {"temporal_pool": heads.TEMPORAL_POOL, "frames": cfg.DATALOADER.TRACKLET.FRAMES}
        return {
            "feat_dim": cfg.MODEL.BACKBONE.FEAT_DIM,
            "embedding_dim": heads.EMBEDDING_DIM,
            "num_classes": heads.NUM_CLASSES,
            "neck_feat": heads.NECK_FEAT,
            "eval_feat": heads.EVAL_FEAT,
            "pool_layer": heads.POOL_LAYER,
            "cls_layer": heads.CLS_LAYER,
            "scale": heads.SCALE,
            "margin": heads.MARGIN,
            "with_bnneck": heads.WITH_BNNECK,
            "neck_bias": heads.NECK_BIAS,
            "norm": heads.NORM,
            "cls_options": classifier_options(cfg),
            **temporal,
            **partial_fc_options(cfg),
        }

    def _make_neck(self, feat_dim: int, embedding_dim: int, with_bnneck: bool, norm: str) -> None:
        """Create the layers of the neck."""
        neck: list[nn.Module] = []
        if embedding_dim > 0:
            neck.append(nn.Conv2d(feat_dim, embedding_dim, 1, bias=False))
            nn.init.kaiming_normal_(neck[0].weight, mode="fan_out")
        if with_bnneck:
            neck.append(build_norm(norm, embedding_dim or feat_dim, freeze_bias=not self.neck_bias))
        self.bottleneck = nn.Sequential(*neck)

    def _neck(self, pooled: torch.Tensor) -> torch.Tensor:
        """Apply the neck: (B, pooled_dim, 1, 1) -> (B, D)."""
        return self.bottleneck(pooled).flatten(1)

    @force_fp32
    def forward(
        self,
        features: torch.Tensor,
        targets: torch.Tensor | None = None,
        tracklets: torch.Tensor | None = None,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute embeddings, and in training mode logits.

        Args:
            features: (B, feat_dim, h, w) float of any precision.
            targets: (B,) int64 class labels, required in training mode.
            tracklets: (B,) int64 tracklet of each frame, 0..N-1, for a head with ``temporal_pool``. In training mode,
                the outputs then have N rows, and ``targets`` are (N,); in evaluation mode, each frame has the feature
                of its tracklet. Default None: images.

        Returns:
            In evaluation mode the features (B, D), float32, not L2-normalized, before or after the neck as set by
            ``eval_feat``. In training mode
            ``{"cls_outputs": (B, K), "pred_class_logits": (B, K), "features": (B, D)}``, float32: the logits with and
            without margin, and the features before or after the neck as set by ``neck_feat``. With Partial FC,
            ``cls_outputs`` are ``PartialLogits``, and there are no ``pred_class_logits``.

        Raises:
            ConfigError: if the head is in training mode and has no classes, or if the pooled feature map does not have
                shape (B, feat_dim, 1, 1).
        """
        pooled = self._pool_frames(features, tracklets)
        if not self.training and self.eval_feat == "before":
            return pooled.flatten(1)
        neck = self._neck(pooled)
        if not self.training:
            return neck
        self._require_classes()
        outputs = {"features": pooled.flatten(1) if self.neck_feat == "before" else neck}
        if self.partial_fc is not None:
            partial: Any = self.partial_fc.logits(neck, self.weight, targets, self.cls_layer)
            return {"cls_outputs": partial, **outputs}
        cls_outputs, logits = self.cls_layer(neck, self.weight, targets)
        return {"cls_outputs": cls_outputs, "pred_class_logits": logits, **outputs}

    @force_fp32
    def logits(self, features: torch.Tensor, tracklets: torch.Tensor | None = None) -> torch.Tensor:
        """Compute scaled class logits without margin; works in both training and evaluation mode.

        Args:
            features: (B, feat_dim, h, w) float of any precision.
            tracklets: see ``forward``.

        Returns:
            (B, K) float32.

        Raises:
            ConfigError: see ``forward``; also if the class centers are divided among several processes.
        """
        self._require_classes()
        if self.row_shards:
            raise ConfigError(
                "MODEL.HEADS.PFC: class logits require all class centers, but this process holds "
                f"{len(self.weight)} of {self.row_shards['weight'].total} rows.\n  fix: use a single process"
            )
        return self.cls_layer.logits(self._neck(self._pool_frames(features, tracklets)), self.weight)

    def _pool_frames(self, features: torch.Tensor, tracklets: torch.Tensor | None = None) -> torch.Tensor:
        """Pool the feature maps and the frames of ``tracklets``; check that the result has 1 x 1 positions."""
        pooled = self._pool(features)
        if tracklets is None or self.temporal_pool is None:
            return pooled
        pooled = self.temporal_pool(pooled.flatten(1), tracklets)[:, :, None, None]
        return pooled if self.training else pooled[tracklets]

    def _pool(self, features: torch.Tensor) -> torch.Tensor:
        """Pool the feature maps, and check that the result has shape (B, feat_dim, 1, 1)."""
        pooled = self.pool_layer(features)
        if pooled.dim() == 2:
            pooled = pooled[:, :, None, None]
        if pooled.shape[1] != self.pooled_dim:
            raise ConfigError(
                f"MODEL.HEADS.POOL_LAYER={type(self.pool_layer).__name__} outputs {pooled.shape[1]} values for a "
                f"feature map of {' x '.join(map(str, features.shape[1:]))}; expected {self.pooled_dim}.\n"
                "  fix: use images of the size in the config (INPUT.SIZE_TRAIN, INPUT.SIZE_TEST)"
            )
        if pooled.shape[2:] != (1, 1):
            size = " x ".join(map(str, pooled.shape[2:]))
            raise ConfigError(
                f"MODEL.HEADS.POOL_LAYER={type(self.pool_layer).__name__} outputs a map of {size}; expected 1 x 1.\n"
                "  fix: choose a global pooling layer, e.g. MODEL.HEADS.POOL_LAYER=GlobalAvgPool"
            )
        return pooled

    def _require_classes(self) -> None:
        if len(self.weight) == 0:
            raise ConfigError(
                "MODEL.HEADS.NUM_CLASSES is 0, but training and class logits require classes.\n"
                "  fix: set MODEL.HEADS.NUM_CLASSES to the number of identities"
            )

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Convert the head weights of any FastReID release, or of TransReID without JPM.

        Raises:
            WeightsError: if the weights are from FastReID v0.1.1's ReductionHead, which is not equivalent to this head,
                or if they have a learned exponent of the pooling, which this head would ignore.
        """
        if any(key.startswith("bnneck.") for key in state) and any(key.startswith("bottleneck.") for key in state):
            raise WeightsError(
                "the weights are from FastReID v0.1.1's ReductionHead, which has a second batch norm before the neck "
                "and is not supported by EmbeddingHead.\n"
                "  fix: use weights of a later FastReID release or train again; to load only the backbone, set "
                "MODEL.BACKBONE.PRETRAIN_PATH to the file"
            )
        has_fc = any(key.startswith("fc.0.") for key in state)  # torchvision's "fc." is the classifier
        if has_fc:
            notes.append(
                "torchreid's features are the output of its fc layer, which MODEL.HEADS.NAME EmbeddingHead does not "
                "have: set MODEL.HEADS.NAME to FCHead to reproduce them"
            )
        if any(key.startswith("b1.") for key in state):
            notes.append(
                "TransReID trained the copies of the last block in its JPM, not the last block of the backbone, which "
                "MODEL.HEADS.NAME EmbeddingHead uses: set MODEL.HEADS.NAME to JPMHead to reproduce its features"
            )
        state = dict(state)
        for name in PUBLISHED_EXPONENTS & state.keys():
            state["pool_layer.p"] = state.pop(name)
        self._check_exponent(state)
        number = len(self.bottleneck) - 1  # index of the batch norm
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

    def _check_exponent(self, state: dict[str, torch.Tensor]) -> None:
        """Raise WeightsError if the exponent of the pooling is fixed, but another one was learned."""
        learned = state.get("pool_layer.p")
        if learned is None or not isinstance(self.pool_layer, GeneralizedMeanPooling) or learned.numel() != 1:
            return
        fixed = self.pool_layer.p
        if not isinstance(fixed, float | int):
            return
        if abs(learned.item() - fixed) > _EXPONENT_TOLERANCE:
            raise WeightsError(
                f"the weights have a learned exponent of the generalized-mean pooling, {learned.item():.4g}, but "
                f"MODEL.HEADS.POOL_LAYER {type(self.pool_layer).__name__} fixes it at {fixed:g}, as in FastReID's AGW "
                "of later releases.\n  fix: set MODEL.HEADS.POOL_LAYER to GeneralizedMeanPoolingP"
            )
