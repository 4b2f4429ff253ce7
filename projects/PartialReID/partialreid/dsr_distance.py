"""Deep spatial reconstruction: dictionaries of pooled feature maps and the reconstruction distance between them."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.utils.errors import ConfigError

POOL_SIZES = (2, 4, 6, 8)
"""Sizes of the square max pools; each has stride 2."""
RIDGE = 0.001


def pool_sizes(height: int, width: int) -> tuple[int, ...]:
    """Return the sizes of the pools that fit into a feature map.

    Raises:
        ConfigError: if the map is smaller than the smallest pool.
    """
    sizes = tuple(size for size in POOL_SIZES if size <= min(height, width))
    if not sizes:
        raise ConfigError(
            f"DSR pools feature maps of at least {POOL_SIZES[0]} x {POOL_SIZES[0]} positions, got {height} x {width}.\n"
            "  fix: increase INPUT.SIZE_TRAIN and INPUT.SIZE_TEST, or set MODEL.BACKBONE.LAST_STRIDE to 1"
        )
    return sizes


def pool_places(maps: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Pool feature maps at several scales (He et al. 2018, arXiv:1801.00881, section 3.2).

    A map of 24 x 8 positions gives 48 + 33 + 20 + 9 = 110 places; smaller maps give fewer, and pools that do not fit
    into the map are not used.

    Args:
        maps: (B, C, H, W) float.

    Returns:
        ``(places, count)``: (B, C, P), the places of all pools, ordered by the size of the pool; and the number of
        places of the smallest pool.

    Raises:
        ConfigError: if the map is smaller than the smallest pool.
    """
    pooled = [F.max_pool2d(maps, size, stride=2).flatten(2) for size in pool_sizes(*maps.shape[2:])]
    return torch.cat(pooled, dim=2), pooled[0].shape[2]


@force_fp32
def reconstruction_matrix(dictionary: torch.Tensor, ridge: float = RIDGE) -> torch.Tensor:
    """Compute (g^T g + ridge I)^-1 g^T of a dictionary g in float64.

    Args:
        dictionary: (C, P) float, places of unit length.
        ridge: weight of the squared L2 norm of the coefficients. Default 0.001.

    Returns:
        (P, C) in the dtype of ``dictionary``.
    """
    # With fewer channels than places, or similar places, the Gram matrix is singular up to the ridge.
    exact = dictionary.double()
    gram = exact.t() @ exact
    gram.diagonal().add_(ridge)
    return torch.cholesky_solve(exact.t(), torch.linalg.cholesky(gram)).to(dictionary.dtype)


@force_fp32
def reconstruction_distances(
    queries: torch.Tensor, scores: torch.Tensor, dictionary: torch.Tensor, ridge: float = RIDGE
) -> torch.Tensor:
    """Compute the DSR distances of queries to one gallery image: sum over i of score_i |g x_i - q_i|.

    ``x_i = (g^T g + ridge I)^-1 g^T q_i`` are the coefficients that reconstruct place q_i of the query from the places
    g of the gallery image (He et al. 2018, arXiv:1801.00881, eq. 3 and 4). Differs: weighted by the scores, as in
    FastReID, instead of averaged.

    Args:
        queries: (B, C, P) float32 or float64, places of unit length.
        scores: (B, P) weights of the places, with sum 1.
        dictionary: (C, P') places of unit length of the gallery image.
        ridge: see ``reconstruction_matrix``. Default 0.001.

    Returns:
        (B,) distances in 0..1.
    """
    count, channels, places = queries.shape
    flat = queries.transpose(0, 1).reshape(channels, count * places)
    residuals = (dictionary @ (reconstruction_matrix(dictionary, ridge) @ flat)).sub_(flat)
    return (residuals.norm(dim=0).view(count, places) * scores).sum(1)
