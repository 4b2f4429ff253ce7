"""Features of the training images: baselines of a batch, and features centered by camera."""

from typing import Any

import numpy as np
import torch

from fastamp.evaluation.baselines import color_histogram, raw_pixels


def pixels_of(batch: dict[str, Any]) -> torch.Tensor:
    """Compute the raw pixels (B, D) of a batch."""
    return raw_pixels(batch["images"])


def colors_of(batch: dict[str, Any]) -> torch.Tensor:
    """Compute the color histograms (B, D) of a batch."""
    return color_histogram(batch["images"])


def center_cameras(features: torch.Tensor, cameras: np.ndarray) -> torch.Tensor:
    """Subtract from each feature (N, D) the mean feature of its camera (N,)."""
    numbers = torch.from_numpy(np.unique(cameras, return_inverse=True)[1])
    counts = torch.bincount(numbers)[:, None]
    means = torch.zeros(len(counts), features.shape[1]).index_add_(0, numbers, features) / counts
    return features - means[numbers]
