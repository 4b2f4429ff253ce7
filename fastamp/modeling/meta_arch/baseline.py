"""Baseline meta-architecture: one backbone, one head and the configured losses."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastamp.config import CfgNode
from fastamp.modeling.backbones import build_backbone, with_feature_dim
from fastamp.modeling.heads import build_heads
from fastamp.modeling.losses import build_losses
from fastamp.modeling.losses.build import check_shareable
from fastamp.modeling.losses.compute import Losses, Outputs, with_columns
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.image_model import ImageModel, normalization
from fastamp.utils.errors import ConfigError
from fastamp.utils.tracklets import number_tracklets


@META_ARCH_REGISTRY.register()
class Baseline(ImageModel):
    """Model with one backbone and one head; computes features in evaluation mode and losses in training mode.

    Args:
        backbone, pixel_mean, pixel_std: see ``ImageModel``.
        heads: head, e.g. ``EmbeddingHead``.
        losses: loss name -> module with ``forward(outputs, targets) -> scalar``.
        gather: gather the features of all ranks for losses that compare images (``over_pairs``). Default False.
    """

    supports_partial_fc = True
    one_graph = True

    def __init__(
        self,
        *,
        backbone: nn.Module,
        heads: nn.Module,
        losses: Mapping[str, nn.Module],
        pixel_mean: list[float] | tuple[float, ...],
        pixel_std: list[float] | tuple[float, ...],
        gather: bool = False,
    ) -> None:
        super().__init__(backbone=backbone, pixel_mean=pixel_mean, pixel_std=pixel_std)
        self.heads = heads
        self.losses = Losses(losses, gather=gather)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Build the backbone, the head and the losses configured in ``MODEL``, and return the constructor arguments.

        Raises:
            ConfigError: if a loss has learnable parameters and the head has several outputs; see also
                ``normalization``, ``build_backbone``, ``build_heads`` and ``build_losses``.
        """
        backbone = build_backbone(cfg)
        cfg = with_feature_dim(cfg, backbone)
        heads, losses = build_heads(cfg, backbone), build_losses(cfg)
        if heads.several_outputs:
            check_shareable(losses, f"the outputs of {cfg.MODEL.HEADS.NAME}")
        return {
            "backbone": backbone,
            "heads": heads,
            "losses": losses,
            "gather": cfg.MODEL.LOSSES.GATHER,
            **normalization(cfg),
            **cls.further_options(cfg),
        }

    @classmethod
    def further_options(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return additional constructor arguments of a subclass; ``FEAT_DIM`` in ``cfg`` is the head's input width."""
        return {}

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features or losses.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255}``; in training mode also ``"targets": (B,) int64``; for a
                backbone with camera or view embeddings also ``"camids"`` and ``"viewids"``, (B,) int64, starting at 0;
                for temporal pooling also ``"tracklet"``, (B,) int64. In evaluation mode, ``batch`` may also be the
                tensor of images.

        Returns:
            In evaluation mode the features (B, D), float32, with temporal pooling those of each frame's tracklet; in
            training mode a dict, loss name -> scalar float32.
        """
        batch = self.as_batch(batch)
        maps = self.feature_maps(batch)
        tracklets = self._tracklets(batch) if self.pools_tracklets else {}
        if not self.training:
            return self.heads(maps, **tracklets)
        if tracklets:
            batch = self._first_frames(batch)
        targets = self.targets(batch)
        return self.loss_terms(self.heads(maps, targets, **tracklets), targets, batch)

    @property
    def pools_tracklets(self) -> bool:
        """True if the head pools the frames of tracklets (``MODEL.HEADS.TEMPORAL_POOL``)."""
        return bool(self.heads.frames > 0)

    def _tracklets(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Number the tracklets of a batch: ``{"tracklets": (B,) int64}``; empty if images are evaluated.

        Raises:
            ConfigError: in training mode, if the batch has no column ``tracklet``, or the frames of a tracklet are not
                consecutive in it.
        """
        column = batch.get("tracklet")
        if not self.training:
            numbers = None if column is None else torch.from_numpy(number_tracklets(column.cpu().numpy()))
        else:
            count, frames = len(batch["images"]), self.heads.frames
            rows = None if column is None or count % frames else column.view(-1, frames)
            # Columns on the device are not checked: reading them would block the host.
            if rows is None or (not rows.is_cuda and (rows != rows[:, :1]).any()):
                raise ConfigError(
                    "MODEL.HEADS.TEMPORAL_POOL requires batches with DATALOADER.TRACKLET.FRAMES consecutive frames "
                    f"({frames}) of each tracklet (column tracklet).\n"
                    "  fix: set DATALOADER.SAMPLER_TRAIN to TrackletSampler"
                )
            numbers = torch.arange(count) // frames
        return {} if numbers is None else {"tracklets": numbers.to(self.device, non_blocking=True)}

    def _first_frames(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the labels and columns of the first frame of each tracklet, and all images."""
        count, frames = len(batch["images"]), int(self.heads.frames)
        labels = (torch.Tensor, list, tuple)
        return {
            name: value[::frames] if name != "images" and isinstance(value, labels) and len(value) == count else value
            for name, value in batch.items()
        }

    def loss_terms(
        self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, batch: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Compute the losses, name -> scalar float32, from the outputs of the head in training mode."""
        return self.losses(with_columns(outputs, batch, self.losses), targets)

    def class_logits(self, batch: dict[str, Any]) -> torch.Tensor:
        """Compute scaled class logits without margin, (B, K) float32; works in both training and evaluation mode."""
        return self.heads.logits(self.feature_maps(batch))
