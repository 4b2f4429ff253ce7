"""Evaluators of attributes, with and without re-identification."""

import csv
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, to_float32
from fastamp.config import Key
from fastamp.evaluation import EVALUATOR_REGISTRY, DatasetEvaluator, ReidEvaluator
from fastamp.utils import comm
from fastamp.utils.errors import writing
from fastattr.attributes import labels_of, parse_names
from fastattr.metrics import AttributeCounts

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "TEST.THRES",
        0.5,
        "FastAttr: an attribute is predicted if its probability is at least this value.",
        low=0,
        high=1,
    ),
)

METRICS = ("mA", "Accu", "Prec", "Recall", "F1")


class AttributeTotals:
    """Counts of a test set over all ranks, with a table of the attributes.

    Args:
        cfg (CfgNode): config; ``MODEL.ATTRIBUTES.NAMES``, ``DATASETS.CATEGORIES`` and ``TEST.THRES`` are used.
        output_dir (str | None): folder of ``attributes.csv``; None writes no file.
    """

    def __init__(self, cfg: Any, output_dir: str | None) -> None:
        self.names, self.output_dir = tuple(cfg.MODEL.ATTRIBUTES.NAMES), output_dir
        self.attributes = parse_names(self.names, cfg.DATASETS.CATEGORIES)
        self.threshold = cfg.TEST.THRES
        self.reset()

    def reset(self) -> None:
        """Discard all counts."""
        self.counts = AttributeCounts(len(self.names), self.threshold)

    def add(self, batch: dict[str, Any], probabilities: torch.Tensor) -> None:
        """Add a batch with the columns of the attributes and its probabilities (B, A)."""
        self.counts.add(probabilities, labels_of(batch, self.attributes, probabilities.device))

    def metrics(self) -> dict[str, Any]:
        """Compute the metrics over all ranks in percent, and write the table of the attributes on rank 0."""
        total = self.counts.merged(comm.gather_rows(self.counts.state()[None]))
        if comm.is_main_process():
            unusual = [self.names[index] for index in total.one_sided()]
            if unusual:
                logger.warning(
                    "attributes without positive or without negative test images count as 0 in one half of mA: %s",
                    ", ".join(unusual),
                )
            self._write(total)
        return total.metrics()

    def _write(self, total: AttributeCounts) -> None:
        means, (hits, positives, _, negatives) = 100 * total.mean_accuracies(), total.sums
        rows = [
            (name, f"{mean:.2f}", int(positive), int(positive + negative), int(hit))
            for name, mean, positive, negative, hit in zip(self.names, means, positives, negatives, hits, strict=True)
        ]
        if self.output_dir is None:
            return
        path = Path(self.output_dir) / "attributes.csv"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(("attribute", "mean_accuracy", "positives", "images", "true_positives"))
                writer.writerows(rows)
        logger.info("wrote %s", path)


@EVALUATOR_REGISTRY.register()
class AttrEvaluator(DatasetEvaluator):
    """Compute mA, and instance-based accuracy, precision, recall and F1, of models whose outputs are probabilities.

    Args:
        cfg (CfgNode): config; see ``AttributeTotals``.
        num_query (int): not used: all images of the test set count.
        output_dir (str | None): folder of ``attributes.csv``. Default None: no file.
    """

    def __init__(self, cfg: Any, num_query: int = 0, output_dir: str | None = None) -> None:
        self.totals = AttributeTotals(cfg, output_dir)

    @classmethod
    def from_config(cls, cfg: Any, *, num_query: int = 0, output_dir: str | None = None) -> "AttrEvaluator":
        """Build the evaluator of a test set."""
        return cls(cfg, num_query, output_dir)

    @staticmethod
    def describe_protocol(cfg: Any) -> str:
        """Describe the evaluation for the log."""
        return f"attributes; predicted from a probability of {cfg.TEST.THRES:g}; metric is mA"

    def metric_names(self) -> list[str]:
        """List the metrics in percent."""
        return [*METRICS, "metric"]

    def reset(self) -> None:
        """Discard all counts."""
        self.totals.reset()

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Add a batch and the probabilities (B, A)."""
        self.totals.add(inputs, outputs)

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; None on ranks other than 0."""
        metrics = self.totals.metrics()
        return metrics if comm.is_main_process() else None


@EVALUATOR_REGISTRY.register()
class JointAttrEvaluator(ReidEvaluator):
    """Compute the metrics of re-identification and of attributes of a ``JointAttrBaseline``."""

    def __init__(self, cfg: Any, num_query: int, output_dir: str | None = None, **options: Any) -> None:
        self.totals = AttributeTotals(cfg, output_dir)
        super().__init__(cfg, num_query, output_dir, **options)

    @classmethod
    def from_config(cls, cfg: Any, *, num_query: int, output_dir: str | None = None) -> "JointAttrEvaluator":
        """Build the evaluator of a test set."""
        return cls(cfg, num_query, output_dir)

    def metric_names(self) -> list[str]:
        """List the metrics in percent."""
        return [*super().metric_names(), *METRICS]

    def reset(self) -> None:
        """Discard all features and counts."""
        super().reset()
        self.totals.reset()

    def extract(
        self, model: nn.Module, batch: dict[str, Any], policy: PrecisionPolicy, flip_test: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the features (B, D) and the probabilities (B, A) of a batch."""
        batches = [batch, batch | {"images": batch["images"].flip(3)}] if flip_test else [batch]
        with policy.autocast():
            outputs = [to_float32(model.features_and_attributes(each)) for each in batches]
        features, probabilities = (torch.stack(each).mean(0) for each in zip(*outputs, strict=True))
        return features, probabilities

    def process(self, inputs: dict[str, Any], outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Add a batch, its features and its probabilities."""
        features, probabilities = outputs
        super().process(inputs, features)
        self.totals.add(inputs, probabilities)

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the metrics; None on ranks other than 0."""
        attributes = self.totals.metrics()
        metrics = super().evaluate()
        if metrics is None:
            return None
        return metrics | {name: attributes[name] for name in METRICS}
