"""FastReID's helpers for losses."""

import torch
import torch.nn.functional as F

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
