"""FastReID's evaluator of classifiers."""

from collections import OrderedDict
from typing import Any

import torch

from fastamp.amp import to_float32
from fastamp.config import CfgNode
from fastamp.fastreid.evaluation.evaluator import DatasetEvaluator
from fastamp.utils import comm


class ClasEvaluator(DatasetEvaluator):
    """Top-1 accuracy of a classifier.

    Args:
        cfg: unused; for compatibility with FastReID.
        output_dir: unused.
    """

    def __init__(self, cfg: CfgNode, output_dir: str | None = None) -> None:
        self.reset()

    def metric_names(self) -> list[str]:
        """List the names of the metrics."""
        return ["Acc@1", "metric"]

    def reset(self) -> None:
        """Discard all accumulated batches."""
        self._correct: list[torch.Tensor] = []

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate one batch of logits, (B, K), and of ``targets``, (B,) int64."""
        self._correct.append(to_float32(outputs).argmax(1).cpu() == inputs["targets"].cpu())

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the accuracy in percent over all ranks; return None on ranks other than 0."""
        correct = sum(int(batch.sum()) for batch in self._correct)
        total = sum(map(len, self._correct))
        correct_of_all, total_of_all = comm.sum_over_ranks([correct, total])
        if not comm.is_main_process():
            return None
        accuracy = 100.0 * correct_of_all / max(1, total_of_all)
        return OrderedDict({"Acc@1": accuracy, "metric": accuracy})
