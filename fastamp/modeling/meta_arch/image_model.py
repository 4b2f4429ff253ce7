"""What every meta-architecture does first: normalize images and run the backbone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.state_dict_conversion import whole_model_names
from fastamp.config import per_channel
from fastamp.utils.moved import renamed_attribute


class ImageModel(nn.Module):
    """A model of images in 0..255 whose subclass says what comes behind its ``backbone``.

    Attributes:
        trunks: names of the submodules that do most of the work, and are worth compiling.
        training_only: names of those that evaluation has no use for.

    Args:
        backbone: (B, C, H, W) -> feature maps. With an attribute ``takes_cameras`` that is true it is also given
            ``camids`` and ``viewids``.
        pixel_mean, pixel_std: C values each, in 0..255.
    """

    trunks: tuple[str, ...] = ("backbone",)
    training_only: tuple[str, ...] = ("losses",)

    def __init__(
        self,
        *,
        backbone: nn.Module,
        pixel_mean: list[float] | tuple[float, ...],
        pixel_std: list[float] | tuple[float, ...],
    ) -> None:
        super().__init__()
        self.backbone = backbone
        # Not in the state dict: they belong to the config.
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(1, -1, 1, 1), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.pixel_mean.device

    def take_normalized_images(self) -> None:
        """Expect normalized images: ``preprocess`` returns its input from now on."""
        self.preprocess = _identity

    def preprocess(self, images: torch.Tensor) -> torch.Tensor:
        """Move (B, C, H, W) images in 0..255, of any dtype, to the device and normalize them into a new tensor."""
        # Pixels travel as they come, e.g. as uint8, a quarter of float32's bytes.
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std

    def as_batch(self, batch: dict[str, Any] | torch.Tensor) -> dict[str, Any]:
        """Return what the model was called with as a batch; a tensor of images is one in evaluation mode.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255, ...}``, or the images alone, as FastReID's models take them.

        Raises:
            TypeError: it is neither, or a tensor in training mode, which needs targets.
            KeyError: there are no images in it.
            ValueError: the images have another number of dimensions or channels.
        """
        if isinstance(batch, torch.Tensor):
            if self.training:
                raise TypeError(
                    f"{type(self).__name__} is in training mode and needs a dict with images and targets; found a "
                    'tensor.\n  fix: model.eval(), or model({"images": images, "targets": targets})'
                )
            batch = {"images": batch}
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"{type(self).__name__} takes a dict or, in evaluation mode, a tensor of images (B, C, H, W) in "
                f"0..255; found {type(batch).__name__}.\n"
                '  fix: model({"images": images}); from files, fastamp.Predictor(checkpoint).features(paths)'
            )
        if "images" not in batch:
            raise KeyError(f'the batch has no "images"; found: {", ".join(map(str, batch))}')
        images, channels = batch["images"], self.pixel_mean.shape[1]
        if not isinstance(images, torch.Tensor) or images.dim() != 4 or images.shape[1] != channels:
            found = tuple(images.shape) if hasattr(images, "shape") else type(images).__name__
            raise ValueError(
                f"images are {found}; expected a tensor (B, {channels}, H, W) in 0..255.\n"
                "  fix: images[None] for a single image, images.permute(0, 3, 1, 2) where the channels come last"
            )
        return batch

    def feature_maps(self, batch: dict[str, Any], backbone: nn.Module | None = None) -> torch.Tensor:
        """Return what the backbone makes of a batch's images, and of their cameras and views where it takes those.

        Args:
            batch: see the subclass.
            backbone: another one of the same kind; None for the model's own.
        """
        backbone = self.backbone if backbone is None else backbone
        images = self.preprocess(batch["images"])
        if not getattr(backbone, "takes_cameras", False):
            return backbone(images)
        if "camids" not in batch:
            raise KeyError('the backbone has camera or view embeddings, but the batch has no "camids"')
        names = [name for name in ("camids", "viewids") if name in batch]
        return backbone(images, **{name: batch[name].to(self.device, non_blocking=True) for name in names})

    def targets(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return a training batch's (B,) int64 class numbers, on the device."""
        if "targets" not in batch:
            raise KeyError('the model is in training mode, but the batch has no "targets"; call model.eval() first?')
        return batch["targets"].to(self.device, non_blocking=True)

    def convert_state_dict(self, state: dict[str, torch.Tensor], notes: list[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of a FastReID, torchreid or TransReID file under ``backbone.`` and ``heads.``."""
        for name in ("pixel_mean", "pixel_std"):
            if name in state and not torch.allclose(state[name].flatten().float(), getattr(self, name).cpu().flatten()):
                notes.append(
                    f"the weights were trained with MODEL.{name.upper()} {state[name].flatten().tolist()}; the config "
                    f"has {getattr(self, name).flatten().tolist()}"
                )
        is_mgn = any(name.startswith("b1_head.") for name in state)
        if is_mgn != hasattr(self, "b1_head"):
            notes.append(
                f"the weights are{'' if is_mgn else ' not'} of MODEL.META_ARCHITECTURE MGN, and the model is"
                f"{' not' if is_mgn else ''}"
            )
        return whole_model_names(state, self.backbone, notes)

    adopt_state = renamed_attribute("adopt_state", "convert_state_dict")


def normalization(cfg: Any) -> dict[str, Any]:
    """Return ``pixel_mean`` and ``pixel_std`` of ``MODEL`` for ``INPUT.CHANNELS``.

    Raises:
        ConfigError: see ``per_channel``.
    """
    return {
        name: per_channel(f"MODEL.{name.upper()}", cfg.MODEL[name.upper()], channels=cfg.INPUT.CHANNELS)
        for name in ("pixel_mean", "pixel_std")
    }


def _identity(images: torch.Tensor) -> torch.Tensor:
    return images
