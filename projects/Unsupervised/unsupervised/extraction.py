"""Features of the training images, extracted without augmentation."""

from typing import Any

import numpy as np
import torch

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.data.dataset import ReidDataset
from fastamp.data.unaugmented import build_unaugmented_loader
from fastamp.evaluation import DatasetEvaluator, inference_on_dataset
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.utils import comm


class _FeatureCollector(DatasetEvaluator):
    """Collect the features of all images, on every rank.

    Args:
        baselines: also compute raw pixels and color histograms.

    Attributes:
        features: features of the model and, with ``baselines``, raw pixels and color histograms, each (N, D) float32 on
            the CPU.
    """

    def __init__(self, *, baselines: bool) -> None:
        self.baselines = baselines
        self.features: list[torch.Tensor] = []
        self._batches: list[list[torch.Tensor]] = []

    def reset(self) -> None:
        self._batches = []

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        images = inputs["images"]
        tensors = [outputs.float(), *((raw_pixels(images), color_histogram(images)) if self.baselines else ())]
        self._batches.append([output.cpu() for output in tensors])

    def evaluate(self) -> dict[str, Any]:
        self.features = [comm.gather_rows(torch.cat(kind)) for kind in zip(*self._batches, strict=True)]
        self._batches = []
        return {}


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
        """Compute the features; see ``_FeatureCollector.features``."""
        comm.broadcast(model.buffers())  # batch-norm statistics differ between ranks
        collector = _FeatureCollector(baselines=baselines)
        inference_on_dataset(model, self._loader, collector, policy=policy)
        return collector.features
