"""Evaluator of face verification."""

import logging
from typing import Any

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator
from fastamp.evaluation.baselines import color_histogram, raw_pixels
from fastamp.feature_pass import Rows
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
        self._rows = Rows()

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
        self._rows.append({"indices": inputs["indices"], "same": inputs["same"], "features": outputs.detach()})
        self._rows.append({name: descriptor(inputs["images"].cpu()) for name, descriptor in self.baselines.items()})

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; None on ranks other than 0.

        Raises:
            DataError: if there are fewer than two pairs, or the images of a pair differ in the column ``same``.
        """
        columns = self._rows.gather()
        if not comm.is_main_process():
            return None
        rows = columns.get("same", torch.empty(0)).numpy() == 1
        same = rows[::2]
        if len(rows) < 4 or len(rows) % 2 or (same != rows[1::2]).any():
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
        metrics = _metrics(columns["features"], same)
        if self.baselines:
            baselines = {name: _metrics(columns[name], same) for name in self.baselines}
            metrics["baselines"] = {name: {"Accuracy": scores["Accuracy"]} for name, scores in baselines.items()}
        return metrics


def _metrics(features: torch.Tensor, same: np.ndarray) -> dict[str, Any]:
    """Return the metrics of pairs, (N,) bool, from the features of their images, (2 N, D)."""
    accuracies, thresholds = verify_pairs(features.double().numpy(), same, folds=min(_FOLDS, len(same)))
    accuracy = 100 * float(accuracies.mean())
    return {
        "Accuracy": accuracy,
        "std": 100 * float(accuracies.std()),
        "threshold": float(thresholds.mean()),
        "metric": accuracy,
    }
