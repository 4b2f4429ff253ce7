"""Features of the training images, extracted without augmentation."""

from typing import Any

import numpy as np
import torch

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.data.dataset import ReidDataset
from fastamp.data.unaugmented import build_unaugmented_loader
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.feature_pass import collect_features
from fastamp.utils import comm


def center_cameras(features: torch.Tensor, cameras: np.ndarray) -> torch.Tensor:
    """Subtract from each feature (N, D) the mean feature of its camera (N,)."""
    numbers = torch.from_numpy(np.unique(cameras, return_inverse=True)[1])
    counts = torch.bincount(numbers)[:, None]
    means = torch.zeros(len(counts), features.shape[1]).index_add_(0, numbers, features) / counts
    return features - means[numbers]


class FeatureExtraction:
    """Extract the features of a training set without augmentation; a collective operation.

    Args:
        cfg: config of the run.
        dataset: training set.
        device: device of the model.
    """

    def __init__(self, cfg: CfgNode, dataset: ReidDataset, device: torch.device) -> None:
        self._loader = build_unaugmented_loader(cfg, dataset, device)

    def __call__(self, model: Any, policy: PrecisionPolicy, *, baselines: bool = False) -> list[torch.Tensor]:
        """Compute the features of all images on each rank: of the model and, with ``baselines``, raw pixels and color
        histograms, each (N, D) float32 on the CPU."""
        comm.broadcast(model.buffers())  # batch-norm statistics differ between ranks
        columns = {"pixels": _raw_pixels, "colors": _color_histogram} if baselines else {}
        options: dict[str, Any] = {"columns": columns, "title": "extracting", "locate": describe_evaluation}
        return [*collect_features(model, self._loader, policy, **options).values()]


def _raw_pixels(batch: dict[str, Any]) -> torch.Tensor:
    return raw_pixels(batch["images"])


def _color_histogram(batch: dict[str, Any]) -> torch.Tensor:
    return color_histogram(batch["images"])
