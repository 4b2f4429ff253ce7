"""Accuracy of a classifier."""

from typing import Any

import torch

from fastamp.compat.evaluation import ClasEvaluator as TopOneEvaluator
from fastamp.evaluation import EVALUATOR_REGISTRY
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


@EVALUATOR_REGISTRY.register()
class ClasEvaluator(TopOneEvaluator):
    """Top-1 accuracy, ``Acc@1`` in percent; with ``TEST.BASELINES`` also that of always the most frequent class.

    Args:
        cfg: config.
        num_query (int): unused.
        output_dir (str | None): unused.
    """

    def __init__(self, cfg: Any, num_query: int = 0, output_dir: str | None = None) -> None:
        self.head, self.num_classes, self.baselines = (
            cfg.MODEL.HEADS.NAME,
            len(cfg.DATASETS.CLASSES),
            cfg.TEST.BASELINES,
        )
        super().__init__(cfg, output_dir)

    @classmethod
    def describe_protocol(cls, cfg: Any) -> str:
        """Describe the evaluation in one line."""
        return "top-1 accuracy of the classifier"

    def reset(self) -> None:
        """Discard all accumulated batches."""
        super().reset()
        self._images_of_class = torch.zeros(self.num_classes, dtype=torch.int64)

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate one batch of logits, (B, K), and of ``targets``, (B,) int64.

        Raises:
            ConfigError: if the model returns no logits of the classes.
        """
        if self.num_classes:
            if outputs.shape[1] != self.num_classes:
                raise ConfigError(
                    f"ClasEvaluator: expected logits of {self.num_classes} classes, got {outputs.shape[1]} values from "
                    f"MODEL.HEADS.NAME={self.head}.\n  fix: set MODEL.HEADS.NAME to ClasHead"
                )
            self._images_of_class += inputs["targets"].cpu().bincount(minlength=self.num_classes)
        super().process(inputs, outputs)

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the accuracy in percent over all ranks; return None on ranks other than 0."""
        metrics = super().evaluate()
        counts = comm.sum_over_ranks(self._images_of_class.tolist())
        if metrics is not None and self.baselines and sum(counts):
            metrics["baselines"] = {"most frequent class": {"Acc@1": 100.0 * max(counts) / sum(counts)}}
        return metrics
