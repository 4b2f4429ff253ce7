"""Similarity maps: contribution of image regions to the similarity of two embeddings."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastamp.modeling.backbones.transformer import TokenBackbone
from fastamp.utils.errors import ConfigError


@dataclass(frozen=True)
class SimilarityMap:
    """Similarity maps of a pair of images.

    Attributes:
        similarity: cosine similarity of the embeddings in float32, without flip test.
        images: model inputs, (H, W, 3) or (H, W) uint8.
        maps: contribution of each position, (h, w) float32 in 0..1.
    """

    similarity: float
    images: tuple[np.ndarray, np.ndarray]
    maps: tuple[np.ndarray, np.ndarray]


def similarity_map(model: nn.Module, batch: dict[str, Any]) -> SimilarityMap:
    """Compute Grad-CAM of the cosine similarity of two embeddings.

    Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391) weights the channels of the last feature map of each image by
    their mean gradient, sums them and clamps the sum at 0. The norms of the embeddings are treated as constants.
    Otherwise, the gradient would have no component along the common direction of the embeddings, and the maps would
    highlight regions where a change increases the similarity, instead of regions that cause the similarity. For a
    Vision Transformer, the feature map consists of the patch tokens before the last block, because only the class token
    is used after that block.

    Args:
        model: model with a ``backbone``, in evaluation mode.
        batch: model input with two images: ``images`` (2, C, H, W) in 0..255, and other entries that the model needs.

    Returns:
        Similarity, images and maps.

    Raises:
        ConfigError: if the model has no spatial feature map.
    """
    backbone = dict(model.named_children()).get("backbone")
    if backbone is None:
        raise ConfigError(
            f"grad-cam requires a model with a backbone; {type(model).__name__} has no attribute backbone.\n"
            "  fix: remove grad-cam from --kind"
        )
    with torch.inference_mode(False), torch.enable_grad(), _recorded_maps(backbone) as recorded:
        features = model(batch).float()
        lengths = features.detach().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        similarity = (features[0] @ features[1]) / lengths.prod()
        if not recorded or len(recorded[-1]) != 2:
            raise ConfigError(
                f"grad-cam cannot record the feature maps of the backbone {type(backbone).__name__}.\n"
                "  fix: remove grad-cam from --kind"
            )
        (gradient,) = torch.autograd.grad(similarity, recorded[-1], allow_unused=True)
    if gradient is None:
        raise ConfigError(
            f"grad-cam requires embeddings that depend on the feature maps of the backbone {type(backbone).__name__}.\n"
            "  fix: remove grad-cam from --kind"
        )
    maps, gradient = (
        _to_feature_maps(tensor, backbone, batch["images"].shape[2:]) for tensor in (recorded[-1].detach(), gradient)
    )
    weights = gradient.float().mean((2, 3), keepdim=True)
    heat = (weights * maps.float()).sum(1).clamp_min(0)
    heat = heat / heat.amax((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    images = batch["images"].clamp(0, 255).to(torch.uint8).cpu()
    shown = [image[:3].permute(1, 2, 0).numpy() if len(image) >= 3 else image[0].numpy() for image in images]
    return SimilarityMap(similarity.item(), (shown[0], shown[1]), tuple(heat.cpu().numpy()))


@contextmanager
def _recorded_maps(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Record the feature maps of a backbone as leaves of the autograd graph."""
    recorded: list[Tensor] = []

    def keep(maps: Tensor) -> Tensor:
        recorded.append(maps.detach().requires_grad_())
        return recorded[-1]

    if isinstance(backbone, TokenBackbone) and backbone.last_block is not None:
        handle = backbone.last_block.register_forward_pre_hook(lambda _, inputs: (keep(inputs[0]), *inputs[1:]))
    else:  # if the head contains the last block, the backbone returns all tokens
        handle = backbone.register_forward_hook(lambda _, __, output: keep(output))
    with handle:
        yield recorded


def _to_feature_maps(values: Tensor, backbone: nn.Module, size: torch.Size) -> Tensor:
    """Convert backbone outputs to (2, C, h, w); tokens of a Vision Transformer are reshaped without its learned tokens.

    Raises:
        ConfigError: if the outputs have no spatial dimensions.
    """
    if values.dim() == 3 and isinstance(backbone, TokenBackbone):
        patches = values[:, backbone.prefix :, : backbone.feature_dim]
        return patches.transpose(1, 2).unflatten(2, backbone.patch_grid((size[0], size[1])))
    if values.dim() != 4 or values.shape[2] * values.shape[3] == 1:
        raise ConfigError(
            f"grad-cam requires spatial feature maps: the backbone {type(backbone).__name__} returns "
            f"{tuple(values.shape[1:])} per image.\n"
            "  fix: remove grad-cam from --kind, or use a ConvNet, a Swin, or a ViT"
        )
    return values
