"""The one place where distances between features are computed, always in float32 or better."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.utils.errors import ConfigError, did_you_mean

METRICS = ("euclidean", "cosine")


def check_metric(metric: str) -> str:
    """Return ``metric`` if it is one of ``METRICS``.

    Raises:
        ConfigError: it is not.
    """
    if metric not in METRICS:
        raise ConfigError(
            f"TEST.METRIC: {metric!r} is no distance; choices: {', '.join(METRICS)}.{did_you_mean(metric, METRICS)}"
        )
    return metric


@force_fp32
def squared_euclidean_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return |x_i - y_j|^2 by one matrix product, not below 0.

    Args:
        x: (M, D) float.
        y: (N, D) float.

    Returns:
        (M, N) float32 (float64 for float64 input).
    """
    squares = x.square().sum(1, keepdim=True) + y.square().sum(1)
    return torch.addmm(squares, x, y.t(), beta=1, alpha=-2).clamp_min(0)


@force_fp32
def pairwise_distance(x: torch.Tensor, y: torch.Tensor, metric: str = "euclidean") -> torch.Tensor:
    """Return the distance of every row of ``x`` to every row of ``y``.

    Args:
        x: (M, D) float features.
        y: (N, D) float features.
        metric: ``"euclidean"``, or ``"cosine"`` for 1 - cosine similarity.

    Returns:
        (M, N) float32 (float64 for float64 input); Euclidean at least 1e-6, so that its gradient is finite;
        cosine in 0..2.

    Raises:
        ConfigError: another metric.
    """
    if check_metric(metric) == "euclidean":
        return squared_euclidean_distance(x, y).clamp_min(1e-12).sqrt()
    return 1 - F.normalize(x, dim=1) @ F.normalize(y, dim=1).t()
