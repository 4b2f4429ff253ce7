"""Evaluator of face verification."""

from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import Key
from fastamp.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator
from fastamp.evaluation.evaluator import extract_features
from fastamp.utils import comm
from fastamp.utils.errors import DataError
from fastface.verification import verify_pairs

KEYS = (
    Key(
        "TEST.ADD_MIRRORED",
        False,
        "FastFace: add the feature of the mirrored image before the normalization, as insightface does.",
    ),
)


@EVALUATOR_REGISTRY.register()
class FaceEvaluator(DatasetEvaluator):
    """Compute the accuracy of ten-fold verification of a test set of pairs, in percent; see ``verify_pairs``.

    Args:
        cfg (CfgNode): config.
        num_query (int): not used.
        output_dir (str | None): not used.
    """

    def __init__(self, cfg: Any, num_query: int = 0, output_dir: str | None = None) -> None:
        self.add_mirrored = cfg.TEST.ADD_MIRRORED
        self.reset()

    @staticmethod
    def describe_protocol(cfg: Any) -> str:
        """Describe the evaluation for the log."""
        mirrored = "feature of the mirrored image added" if cfg.TEST.ADD_MIRRORED else "no mirrored images"
        return f"ten-fold verification; squared Euclidean distance of normalized features; {mirrored}"

    def metric_names(self) -> list[str]:
        """List the metrics in percent."""
        return ["Accuracy", "metric"]

    def reset(self) -> None:
        """Discard all accumulated batches."""
        self._rows: list[torch.Tensor] = []

    def extract(
        self, model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, flip_test: bool = False
    ) -> torch.Tensor:
        """Compute the features of a batch; the mean with those of the mirrored images is their sum, up to a factor."""
        return extract_features(model, batch, policy, flip_test or self.add_mirrored)

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

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; None on ranks other than 0."""
        rows = comm.gather_rows(torch.cat(self._rows))
        if not comm.is_main_process():
            return None
        rows = rows[rows[:, 0].argsort()]
        same = rows[::2, 1].numpy() == 1
        result = verify_pairs(rows[:, 2:].numpy(), same, folds=min(10, len(same)))
        accuracy = 100 * float(result.accuracies.mean())
        return {
            "Accuracy": accuracy,
            "std": 100 * float(result.accuracies.std()),
            "threshold": float(result.thresholds.mean()),
            "metric": accuracy,
        }
