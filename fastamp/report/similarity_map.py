"""Which parts of two images make their embeddings alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastamp.modeling.backbones.vit import VisionTransformer
from fastamp.utils.errors import ConfigError


@dataclass(frozen=True)
class SimilarityMap:
    """What was found of two images.

    Attributes:
        similarity: the cosine of their embeddings, in float32 and without a flip test.
        images: of either, (H, W, 3) or (H, W) uint8, as the model got it.
        maps: of either, (h, w) float32 in 0..1: how much a place adds to the similarity.
    """

    similarity: float
    images: tuple[np.ndarray, np.ndarray]
    maps: tuple[np.ndarray, np.ndarray]


def similarity_map(model: nn.Module, batch: dict[str, Any]) -> SimilarityMap:
    """Return which places of two images make their embeddings alike.

    Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391) of the cosine similarity: of each image's last feature map, the
    channels weighed by the mean gradient, what is below 0 left out. The embeddings' lengths are constants to the
    gradient: it would otherwise lack all that the two embeddings have in common, and show what could make them more
    alike instead of what does. For a Vision Transformer the map is made of the patches' tokens before the last block,
    behind which only the class token counts.

    Args:
        model: in evaluation mode, of a ``backbone``.
        batch: of two images, as the model takes it: ``images``: (2, C, H, W) in 0..255, and what else it needs.

    Raises:
        ConfigError: the model has no such map.
    """
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        raise ConfigError(f"{type(model).__name__} has no backbone whose feature maps could be shown")
    with torch.inference_mode(False), torch.enable_grad(), _recorded_maps(backbone) as recorded:
        features = model(batch).float()
        lengths = features.detach().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        similarity = (features[0] @ features[1]) / lengths.prod()
        if not recorded or len(recorded[-1]) != 2:
            raise ConfigError(f"the feature maps of {type(backbone).__name__} could not be seen")
        (gradient,) = torch.autograd.grad(similarity, recorded[-1], allow_unused=True)
    if gradient is None:
        raise ConfigError(f"the embedding does not depend on the feature maps of {type(backbone).__name__}")
    maps, gradient = (
        _to_feature_maps(each, backbone, batch["images"].shape[2:]) for each in (recorded[-1].detach(), gradient)
    )
    weights = gradient.float().mean((2, 3), keepdim=True)
    heat = (weights * maps.float()).sum(1).clamp_min(0)
    heat = heat / heat.amax((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    images = batch["images"].clamp(0, 255).to(torch.uint8).cpu()
    shown = [image[:3].permute(1, 2, 0).numpy() if len(image) >= 3 else image[0].numpy() for image in images]
    return SimilarityMap(similarity.item(), (shown[0], shown[1]), tuple(heat.cpu().numpy()))


@contextmanager
def _recorded_maps(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Keep the maps that a backbone computes inside; the gradient begins at them."""
    recorded: list[Tensor] = []

    def keep(maps: Tensor) -> Tensor:
        recorded.append(maps.detach().requires_grad_())
        return recorded[-1]

    if isinstance(backbone, VisionTransformer) and backbone.norm is not None:
        handle = backbone.blocks[-1].register_forward_pre_hook(lambda _, inputs: (keep(inputs[0]), *inputs[1:]))
    else:  # with all tokens, where the head has the last block
        handle = backbone.register_forward_hook(lambda _, __, output: keep(output))
    try:
        yield recorded
    finally:
        handle.remove()


def _to_feature_maps(values: Tensor, backbone: nn.Module, size: torch.Size) -> Tensor:
    """Return (2, C, h, w) of a backbone's maps or, for a Vision Transformer, of its tokens, the class token left out.

    Raises:
        ConfigError: they have no places.
    """
    if values.dim() == 3 and isinstance(backbone, VisionTransformer):
        patch, stride = backbone.patch_embed.proj.kernel_size, backbone.patch_embed.proj.stride
        height, width = ((side - kernel) // step + 1 for side, kernel, step in zip(size, patch, stride, strict=True))
        return values[:, 1:].transpose(1, 2).reshape(2, -1, height, width)
    if values.dim() != 4 or values.shape[2] * values.shape[3] == 1:
        raise ConfigError(
            f"the backbone {type(backbone).__name__} returns {tuple(values.shape[1:])} for an image, which has no "
            "places: there is no map to show.\n"
            "  fix: leave grad-cam out of --kind; a ConvNet, a ViT of build_vit_backbone or a Swin has one"
        )
    return values
