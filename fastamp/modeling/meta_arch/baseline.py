"""One backbone, one head, and the configured losses."""

from typing import Any

import torch
from torch import nn

from fastamp.config import per_channel
from fastamp.modeling.backbones import build_backbone
from fastamp.modeling.heads import build_heads
from fastamp.modeling.losses import build_losses
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.utils import comm


@META_ARCH_REGISTRY.register()
class Baseline(nn.Module):
    """Normalize images, run backbone and head, and in training mode the losses.

    Args:
        backbone: (B, C, H, W) -> (B, D, h, w).
        heads: see ``EmbeddingHead``.
        losses: loss name -> module of ``(outputs, targets) -> ()``.
        pixel_mean, pixel_std: C values each, in 0..255.
        gather: let the losses that compare images with each other (``over_pairs``) see those of all ranks.
    """

    def __init__(
        self,
        *,
        backbone: nn.Module,
        heads: nn.Module,
        losses: nn.ModuleDict,
        pixel_mean: list[float] | tuple[float, ...],
        pixel_std: list[float] | tuple[float, ...],
        gather: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = heads
        self.losses = losses
        self.gather = gather
        # Not in the state dict: they belong to the config.
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(1, -1, 1, 1), persistent=False)

    @classmethod
    def from_config(cls, cfg: Any) -> "Baseline":
        """Return the model of ``MODEL``, for images of ``INPUT.CHANNELS``.

        Raises:
            ConfigError: see ``per_channel``, and what backbone, heads and losses raise.
        """
        pixel_mean, pixel_std = (
            per_channel(f"MODEL.{name}", cfg.MODEL[name], channels=cfg.INPUT.CHANNELS)
            for name in ("PIXEL_MEAN", "PIXEL_STD")
        )
        return cls(
            backbone=build_backbone(cfg),
            heads=build_heads(cfg),
            losses=build_losses(cfg),
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            gather=cfg.MODEL.LOSSES.GATHER,
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.pixel_mean.device

    def preprocess(self, images: torch.Tensor) -> torch.Tensor:
        """Move (B, C, H, W) images in 0..255, of any dtype, to the device and normalize them into a new tensor."""
        # Pixels travel as they come, e.g. as uint8, a quarter of float32's bytes.
        images = images.to(self.device, non_blocking=True)
        return (images.float() - self.pixel_mean) / self.pixel_std

    def forward(self, batch: dict[str, Any]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or losses.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255}``, in training mode also ``"targets": (B,) int64``.

        Returns:
            In evaluation mode (B, D) float32 features; in training mode loss name -> () float32.
        """
        features = self.backbone(self.preprocess(batch["images"]))
        if not self.training:
            return self.heads(features)
        if "targets" not in batch:
            raise KeyError('the model is in training mode, but the batch has no "targets"; call model.eval() first?')
        targets = batch["targets"].to(self.device, non_blocking=True)
        outputs = self.heads(features, targets)
        whole = (outputs, targets)
        if self.gather and any(_over_pairs(loss) for loss in self.losses.values()):
            whole = (outputs | {"features": comm.all_gather(outputs["features"])}, comm.all_gather(targets))
        return {
            name: loss(*whole) if _over_pairs(loss) else loss(outputs, targets) for name, loss in self.losses.items()
        }


def _over_pairs(loss: nn.Module) -> bool:
    """Whether a loss compares images with each other, of which it then needs as many as there are."""
    return getattr(loss, "over_pairs", False)
