"""FastReID's helpers for losses."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.layers.distance import pairwise_distance
from fastamp.utils import comm


@torch.no_grad()
def concat_all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Concatenate the (B, ...) tensors of all ranks, without gradient: (world size * B, ...)."""
    return comm.all_gather(tensor)


def normalize(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Normalize a tensor to unit L2 norm along ``axis``."""
    return F.normalize(x, dim=axis)


def euclidean_dist(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute the Euclidean distances between the rows of ``x`` (M, D) and ``y`` (N, D): (M, N) float32."""
    return pairwise_distance(x, y, "euclidean")


def cosine_dist(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute 1 - cosine similarity between the rows of ``x`` (M, D) and ``y`` (N, D): (M, N) float32."""
    return pairwise_distance(x, y, "cosine")


def __getattr__(name: str) -> Any:
    if name.startswith("build_") and name.endswith("_backbone"):
        from fastamp.modeling.backbones.build import BACKBONE_REGISTRY  # it imports this module

        return functools.partial(BACKBONE_REGISTRY.build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


LOSS_ARGUMENTS = {
    "CrossEntropyLoss": ("ce", {"eps": "epsilon", "alpha": "alpha"}),
    "TripletLoss": ("tri", {"margin": "margin", "norm_feat": "normalize", "hard_mining": "hard_mining"}),
    "CircleLoss": ("circle", {"margin": "margin", "gamma": "gamma"}),
    "Cosface": ("cosface", {"margin": "margin", "gamma": "gamma"}),
}
"""Loss -> its section in FastReID's ``loss_kwargs``, and argument in FastReID -> attribute of the loss."""


class LossArguments(dict):
    """FastReID's ``loss_kwargs``: ``loss_names``, and the arguments of each of these losses.

    Args:
        losses: losses of the model, which are also stored in the attribute ``losses``.
        names: ``loss_names``. Default None: the class names of ``losses``.
    """

    def __init__(self, losses: Mapping[str, nn.Module], names: Iterable[str] | None = None) -> None:
        self.losses = losses
        by_name = {type(loss).__name__: loss for loss in losses.values()}
        super().__init__(loss_names=tuple(by_name if names is None else names))
        for name, (section, arguments) in LOSS_ARGUMENTS.items():
            if name in by_name:
                constructor_keys = arguments | {"scale": "scale"}
                self[section] = {key: getattr(by_name[name], attribute) for key, attribute in constructor_keys.items()}
