"""FastReID's distances between features, computed without the other ranks."""

from typing import Any

import numpy as np
import torch

from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.evaluation.rerank import ReRankedDistances, ReRanking, add_overlaps, reciprocal_weights
from fastamp.layers.distance import pairwise_distance, squared_euclidean_distance
from fastamp.utils import comm
from fastamp.utils.errors import check_choice


@comm.as_single_process()
@torch.no_grad()
def build_dist(feat_1: torch.Tensor, feat_2: torch.Tensor, metric: str = "euclidean", **kwargs: Any) -> np.ndarray:
    """Compute the distances between two sets of features.

    Args:
        feat_1: (M, D) features.
        feat_2: (N, D) features.
        metric: ``"euclidean"`` (squared, as in FastReID), ``"cosine"`` or ``"jaccard"``. Default ``"euclidean"``.
        kwargs: ``k1`` and ``k2`` (int) of the Jaccard distance. Default 20 and 6.

    Returns:
        (M, N) float32.
    """
    check_choice("metric", metric, ("euclidean", "cosine", "jaccard"))
    if metric == "euclidean":
        return squared_euclidean_distance(feat_1, feat_2).cpu().numpy()
    if metric == "cosine":
        return pairwise_distance(feat_1, feat_2, "cosine").cpu().numpy()
    options = ReRanking(k1=kwargs.get("k1", 20), k2=kwargs.get("k2", 6), lambda_value=0.0, variant="fastreid")
    distances = ReRankedDistances(feat_1, feat_2, metric="euclidean", options=options)
    return np.concatenate([block.cpu().numpy().copy() for _, block in distances.blocks()])


def compute_euclidean_distance(features: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """Compute squared Euclidean distances; see ``build_dist``."""
    return build_dist(features, others, "euclidean")


def compute_cosine_distance(features: torch.Tensor, others: torch.Tensor) -> np.ndarray:
    """Compute 1 - cosine similarity; see ``build_dist``."""
    return build_dist(features, others, "cosine")


@comm.as_single_process()
@torch.no_grad()
def compute_jaccard_distance(
    features: torch.Tensor, k1: int = 20, k2: int = 6, search_option: int = 0, fp16: bool = False
) -> np.ndarray:
    """Compute the Jaccard distances (N, N) of features (N, D), e.g. for clustering.

    ``search_option`` and ``fp16`` are ignored: the neighbors are exact and distances are float32. For many images, use
    ``fastamp.evaluation.clustering.jaccard_distances``, which stores the small distances only.
    """
    features = features.detach().float()
    features = features - features.mean(0)  # rounding errors become relative to the spread instead of the offset
    neighbors = nearest_neighbors(features, features, max(k1, k2))
    options = ReRanking(k1=k1, k2=k2, variant="fastreid")
    weights = reciprocal_weights(features, neighbors.indices, neighbors.farthest, options)
    overlap = torch.zeros(weights.shape)
    add_overlaps(weights, weights.tocsc(), overlap)
    return (1 - overlap / (2 - overlap)).clamp_min(0).numpy()
