"""Evaluator of face verification."""

import logging
from typing import Any

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.utils import comm
from fastamp.utils.errors import DataError
from fastface.verification import verify_pairs

logger = logging.getLogger(f"fastamp.{__name__}")

_FOLDS = 10


@EVALUATOR_REGISTRY.register()
class FaceEvaluator(DatasetEvaluator):
    """Compute the accuracy of ten-fold verification of a test set of pairs, in percent; see ``verify_pairs``.

    With ``TEST.FLIP.ENABLED``, the feature of the mirrored image is added before the normalization, as in insightface.
    ``TEST.BASELINES`` adds the accuracy of raw pixels and color histograms.

    Args:
        cfg: config.
        num_query: not used.
        output_dir: not used.
    """

    def __init__(self, cfg: CfgNode, num_query: int = 0, output_dir: str | None = None) -> None:
        self.baselines = {"raw pixels": raw_pixels, "color histogram": color_histogram} if cfg.TEST.BASELINES else {}
        self.reset()

    @staticmethod
    def describe_protocol(cfg: CfgNode) -> str:
        """Describe the evaluation for the log."""
        mirrored = "feature of the mirrored image added" if cfg.TEST.FLIP.ENABLED else "no mirrored images"
        return f"ten-fold verification; squared Euclidean distance of normalized features; {mirrored}"

    def metric_names(self) -> list[str]:
        """List the metrics in percent."""
        return ["Accuracy", "metric"]

    def reset(self) -> None:
        """Discard all accumulated batches."""
        self._rows: list[torch.Tensor] = []
        self._descriptors: dict[str, list[torch.Tensor]] = {name: [] for name in self.baselines}

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate a batch with the column ``same``, 1 for both images of a pair of one identity, and its features.

        Raises:
            DataError: if the test set has no pairs.
        """
        if "same" not in inputs:
            raise DataError(
                "FaceEvaluator: the test set has no column 'same' of pairs.\n"
                "  fix: use a dataset of pairs, e.g. DATASETS.TESTS LFW"
            )
        parts = (inputs["indices"].cpu()[:, None], inputs["same"].cpu()[:, None], outputs.detach().cpu())
        self._rows.append(torch.cat([part.double() for part in parts], dim=1))
        for name, descriptor in self.baselines.items():
            self._descriptors[name].append(descriptor(inputs["images"].cpu()).double())

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; None on ranks other than 0.

        Raises:
            DataError: if there are fewer than two pairs, or the images of a pair differ in the column ``same``.
        """
        rows = comm.gather_rows(torch.cat(self._rows)) if self._rows else torch.empty(0, 2)
        descriptors = {name: comm.gather_rows(torch.cat(rows)) for name, rows in self._descriptors.items() if rows}
        if not comm.is_main_process():
            return None
        order = rows[:, 0].argsort()
        rows = rows[order]
        same = rows[::2, 1].numpy() == 1
        if len(rows) < 4 or len(rows) % 2 or (same != (rows[1::2, 1].numpy() == 1)).any():
            raise DataError(
                f"FaceEvaluator: expected at least two pairs of images that have the same value in the column 'same', "
                f"got {len(rows)} images.\n  fix: use a dataset of pairs, e.g. DATASETS.TESTS LFW"
            )
        if len(same) < _FOLDS:
            logger.warning(
                "%d pairs are verified in %d folds instead of %d.\n"
                "  fix: for comparable results, use at least %d pairs",
                *(len(same), len(same), _FOLDS, _FOLDS),
            )
        metrics = _metrics(rows[:, 2:], same)
        if descriptors:
            baselines = {name: _metrics(rows[order], same) for name, rows in descriptors.items()}
            metrics["baselines"] = {name: {"Accuracy": scores["Accuracy"]} for name, scores in baselines.items()}
        return metrics


def _metrics(features: torch.Tensor, same: np.ndarray) -> dict[str, Any]:
    """Return the metrics of pairs, (N,) bool, from the features of their images, (2 N, D)."""
    result = verify_pairs(features.numpy(), same, folds=min(_FOLDS, len(same)))
    accuracy = 100 * float(result.accuracies.mean())
    return {
        "Accuracy": accuracy,
        "std": 100 * float(result.accuracies.std()),
        "threshold": float(result.thresholds.mean()),
        "metric": accuracy,
    }
