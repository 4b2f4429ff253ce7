"""One backbone, one head, and the configured losses."""

from typing import Any

import torch
from torch import nn

from fastamp.config import per_channel
from fastamp.modeling.backbones import build_backbone, with_feature_dim
from fastamp.modeling.heads import build_heads
from fastamp.modeling.losses import build_losses
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY
from fastamp.modeling.meta_arch.origins import whole_model_names
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
        backbone = build_backbone(cfg)
        return cls(
            backbone=backbone,
            heads=build_heads(with_feature_dim(cfg, backbone), backbone),
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

    def feature_maps(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return what the backbone makes of a batch's images, and of their cameras and views where it takes those."""
        images = self.preprocess(batch["images"])
        if not getattr(self.backbone, "takes_cameras", False):
            return self.backbone(images)
        where = {
            name: batch[name].to(self.device, non_blocking=True) for name in ("camids", "viewids") if name in batch
        }
        return self.backbone(images, **where)

    def targets(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return a training batch's (B,) int64 class numbers, on the device."""
        if "targets" not in batch:
            raise KeyError('the model is in training mode, but the batch has no "targets"; call model.eval() first?')
        return batch["targets"].to(self.device, non_blocking=True)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features, or losses.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255}``, in training mode also ``"targets": (B,) int64``; with camera
                or view embeddings ``"camids"`` and ``"viewids"``, (B,) int64 from 0.

        Returns:
            In evaluation mode (B, D) float32 features; in training mode loss name -> () float32.
        """
        maps = self.feature_maps(batch)
        if not self.training:
            return self.heads(maps)
        targets = self.targets(batch)
        return compute_losses(self.losses, self.heads(maps, targets), targets, gather=self.gather)

    def adopt_state(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of a FastReID, torchreid or TransReID file under ``backbone.`` and ``heads.``."""
        for name in ("pixel_mean", "pixel_std"):
            if name in state and not torch.allclose(state[name].flatten().float(), getattr(self, name).cpu().flatten()):
                notes.append(
                    f"the weights were trained with MODEL.{name.upper()} {state[name].flatten().tolist()}; the config "
                    f"has {getattr(self, name).flatten().tolist()}"
                )
        return whole_model_names(state, set(self.backbone.state_dict()), notes)


Outputs = dict[str, torch.Tensor]


def compute_losses(
    losses: nn.ModuleDict, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor, *, gather: bool
) -> dict[str, torch.Tensor]:
    """Return each loss of a head's outputs; where it has several, the sum of the loss of each times its weight.

    Args:
        losses: name -> module of ``(outputs, targets) -> ()``.
        outputs: what a head returns in training mode, or several of that with their weights.
        targets: (B,) int64 class numbers.
        gather: let the losses that compare images with each other (``over_pairs``) see those of all ranks.

    Returns:
        Loss name -> () float32.
    """
    if isinstance(outputs, list):
        of_each = [
            {name: weight * loss for name, loss in compute_losses(losses, each, targets, gather=gather).items()}
            for weight, each in outputs
        ]
        return {name: torch.stack([each[name] for each in of_each]).sum() for name in losses}
    whole = (outputs, targets)
    if gather and any(_over_pairs(loss) for loss in losses.values()):
        whole = (outputs | {"features": comm.all_gather(outputs["features"])}, comm.all_gather(targets))
    return {name: loss(*whole) if _over_pairs(loss) else loss(outputs, targets) for name, loss in losses.items()}


def _over_pairs(loss: nn.Module) -> bool:
    """Whether a loss compares images with each other, of which it then needs as many as there are."""
    return getattr(loss, "over_pairs", False)
