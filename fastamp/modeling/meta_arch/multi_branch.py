"""Base class of meta-architectures with several heads on the feature maps of several branches."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.modeling.losses.compute import Losses, Outputs, compute_losses
from fastamp.modeling.meta_arch.image_model import ImageModel


class MultiBranchModel(ImageModel):
    """Model with several heads; the features of all heads are concatenated, and each head has a classification loss.

    A subclass creates a module ``<name>_head`` for each head and defines ``head_inputs``.

    Attributes:
        head_names: names of the heads, in the order of their features in the output.
        pair_features: name of a feature for losses over pairs -> heads whose features are concatenated to it.
        mean_over_heads: average each loss over the heads or the features for pairs; otherwise, sum it.
        normalize_heads: scale the feature of each head to unit length before the concatenation.

    Args:
        backbone: layers that all branches share.
        losses: loss name -> module with ``forward(outputs, targets) -> scalar``.
        gather: gather the features of all ranks for losses that compare images (``over_pairs``). Default False.
        pixels: ``pixel_mean`` and ``pixel_std``; see ``ImageModel``.
    """

    head_names: ClassVar[tuple[str, ...]]
    pair_features: ClassVar[dict[str, tuple[str, ...]]]
    mean_over_heads: ClassVar[bool] = True
    normalize_heads: ClassVar[bool] = False

    def __init__(self, *, backbone: nn.Module, losses: nn.ModuleDict, gather: bool = False, **pixels: Any) -> None:
        super().__init__(backbone=backbone, **pixels)
        self.losses = Losses(losses, gather=gather)
        self.gather = gather

    def head_inputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Compute the input of each head: head name -> (B, D, h, w)."""
        raise NotImplementedError

    def forward(self, batch: dict[str, Any] | torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Compute features or losses.

        Args:
            batch: ``{"images": (B, C, H, W) in 0..255}``; in training mode also ``"targets": (B,) int64``. In
                evaluation mode, ``batch`` may also be the tensor of images.

        Returns:
            In evaluation mode the features of all heads, (B, number of heads x D), float32, concatenated in the order
            of ``head_names``. In training mode a dict, ``<loss name>_<head or feature>`` -> scalar float32.
        """
        batch = self.as_batch(batch)
        inputs = self.head_inputs(batch)
        if not self.training:
            features = [self._head(name)(inputs[name]) for name in self.head_names]
            return torch.cat([F.normalize(part, dim=1) for part in features] if self.normalize_heads else features, 1)
        targets = self.targets(batch)
        outputs = {name: self._head(name)(inputs[name], targets) for name in self.head_names}
        return self.loss_terms(outputs, targets)

    def loss_terms(self, outputs: dict[str, Outputs], targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the losses, name -> scalar float32, from the outputs of each head in training mode."""
        losses = self._modules["losses"]  # not the attribute, which may be a method of a subclass
        pair_losses = {name: loss for name, loss in losses.items() if loss.over_pairs}
        image_losses = {name: loss for name, loss in losses.items() if name not in pair_losses}
        pairs = {
            name: outputs[name] | {"features": torch.cat([outputs[part]["features"] for part in parts], dim=1)}
            for name, parts in self.pair_features.items()
        }
        return self._weighted(image_losses, outputs, targets) | self._weighted(pair_losses, pairs, targets)

    def class_logits(self, batch: dict[str, Any]) -> torch.Tensor:
        """Compute the mean class logits over all heads, (B, K) float32; works in both training and evaluation mode."""
        inputs = self.head_inputs(batch)
        return torch.stack([self._head(name).logits(inputs[name]) for name in self.head_names]).mean(0)

    def _head(self, name: str) -> nn.Module:
        return self.get_submodule(f"{name}_head")

    def _weighted(
        self, losses: dict[str, nn.Module], outputs: dict[str, dict[str, torch.Tensor]], targets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Compute losses for each of the outputs, ``<loss name>_<output>`` -> scalar; their sum is the mean or sum."""
        count = len(outputs) if self.mean_over_heads else 1
        return {
            f"{name}_{output}": value / count
            for output, branch_outputs in outputs.items()
            for name, value in compute_losses(losses, branch_outputs, targets, gather=self.gather).items()
        }
