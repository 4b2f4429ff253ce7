"""Evaluators of attributes, with and without re-identification."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastamp.config import CfgNode, Key
from fastamp.evaluation import (
    EVALUATOR_REGISTRY,
    DatasetEvaluator,
    ImageExample,
    ReidEvaluator,
    ReportSection,
    Table,
)
from fastamp.feature_pass import Rows
from fastamp.utils import comm
from fastamp.utils.errors import writing
from fastamp.utils.files import write_csv
from fastattr.attributes import labels_of, most_frequent_values, parse_names
from fastattr.metrics import AttributeCounts

logger = logging.getLogger(f"fastamp.{__name__}")

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
_MOST_IMAGES, _SHOWN_ERRORS = 24, 4


class AttributeTotals:
    """Probabilities and labels of a test set, with a table of the attributes and the images with the most errors.

    Args:
        cfg: config; ``MODEL.ATTRIBUTES.NAMES``, ``DATASETS.CATEGORIES`` and ``TEST.THRES`` are used.
        output_dir: folder of ``attributes.csv``; None writes no file.
    """

    def __init__(self, cfg: CfgNode, output_dir: str | None) -> None:
        self.names, self.output_dir = tuple(cfg.MODEL.ATTRIBUTES.NAMES), output_dir
        self.attributes = parse_names(self.names, cfg.DATASETS.CATEGORIES)
        self.threshold = cfg.TEST.THRES
        self.reset()

    def reset(self) -> None:
        """Discard all rows."""
        self._rows = Rows()

    def add(self, batch: dict[str, Any], probabilities: torch.Tensor) -> None:
        """Add a batch with the columns of the attributes and its probabilities (B, A)."""
        labels = labels_of(batch, self.attributes, probabilities.device)
        indices = self._rows.positions(batch, len(labels))
        self._rows.append({"indices": indices, "probabilities": probabilities, "labels": labels})

    def metrics(self) -> dict[str, Any]:
        """Compute the metrics over all ranks in percent, and write the table of the attributes on rank 0.

        ``baselines`` has the metrics of the prediction of the most frequent value of each column for all images.
        """
        self._columns = self._rows.gather()
        labels = self._columns["labels"]
        total = AttributeCounts(self._columns["probabilities"], labels, self.threshold)
        self._of_attributes = total.of_attributes()
        if comm.is_main_process():
            unusual = [self.names[index] for index in total.one_sided()]
            if unusual:
                logger.warning(
                    "attributes without positive or without negative test images count as 0 in one half of mA: %s.\n"
                    "  fix: add test images with the missing values",
                    ", ".join(unusual),
                )
            self._write()
        constant = most_frequent_values(self.attributes, total.sums[1], total.sums[1] + total.sums[3])
        baseline = AttributeCounts(constant.expand_as(labels), labels, self.threshold)
        return total.metrics() | {"baselines": {"most frequent values": baseline.metrics()}}

    def report_section(self) -> ReportSection:
        """Return the section of the report, after ``metrics``."""
        percentages = self._percentages(
            ("fraction", "mA", "accuracy", "majority", "precision", "recall", "f1"), digits=1, undefined="–"
        )
        counts = (f"{int(count):,}" for count in self._of_attributes["images"])
        titles = ("attribute", "images", "positive %", "mA %", "accuracy %", "majority %", "precision %", "recall %")
        return ReportSection(
            "Attributes",
            f"An attribute is predicted from a probability of {self.threshold:g}. mA: mean of the accuracies on "
            "positive and on negative images. Majority: accuracy of always giving the more frequent answer. "
            "–: not defined.",
            [Table("", (*titles, "F1 %"), [*zip(self.names, counts, *percentages, strict=True)])],
            examples=self._examples(),
            examples_title="Images with the most errors",
        )

    def _percentages(self, columns: Sequence[str], *, digits: int, undefined: str) -> list[list[str]]:
        """Return columns of ``AttributeCounts.of_attributes`` as texts, one for each attribute."""
        return [
            [
                f"{value:.{digits}f}" if math.isfinite(value) else undefined
                for value in self._of_attributes[name].tolist()
            ]
            for name in columns
        ]

    def _examples(self) -> list[ImageExample]:
        """Return the images with the most errors, each with its largest errors."""
        probabilities, labels = self._columns["probabilities"], self._columns["labels"]
        positive = labels > 0.5
        wrong = ((probabilities >= self.threshold) != positive) & ~labels.isnan()
        # 1 + the absolute error of wrong predictions, and 0 of others and of missing labels.
        errors = torch.where(wrong, 1 + (probabilities - positive.float()).abs(), 0.0)
        total = errors.sum(1)
        examples = []
        for row in total.argsort(descending=True, stable=True)[:_MOST_IMAGES].tolist():
            if not total[row]:
                break
            lines = [f"{int(wrong[row].sum())} of {int(labels[row].isfinite().sum())} wrong"]
            for number in errors[row].argsort(descending=True).tolist()[:_SHOWN_ERRORS]:
                if wrong[row, number]:
                    kind = "missed" if positive[row, number] else "not"
                    lines.append(f"{kind} {self.names[number]}, {100 * probabilities[row, number]:.0f} %")
            examples.append(ImageExample(int(self._columns["indices"][row]), lines))
        return examples

    def _write(self) -> None:
        if self.output_dir is None:
            return
        path = Path(self.output_dir) / "attributes.csv"
        names = ("mA", "fraction", "accuracy", "majority", "precision", "recall", "f1")
        counts = [self._of_attributes[name].int().tolist() for name in ("images", "positives")]
        rows = zip(self.names, *counts, *self._percentages(names, digits=2, undefined=""), strict=True)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, [("attribute", "images", "positives", *names), *rows])
        logger.info("wrote %s", path)


@EVALUATOR_REGISTRY.register()
class AttrEvaluator(DatasetEvaluator):
    """Compute mA, and instance-based accuracy, precision, recall and F1, of models whose outputs are probabilities.

    Args:
        cfg: config; see ``AttributeTotals``.
        num_query: not used: all images of the test set count.
        output_dir: folder of ``attributes.csv``. Default None: no file.
    """

    def __init__(self, cfg: CfgNode, num_query: int = 0, output_dir: str | None = None) -> None:
        self.totals = AttributeTotals(cfg, output_dir)

    @staticmethod
    def describe_protocol(cfg: CfgNode) -> str:
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

    def report_sections(self) -> list[ReportSection]:
        """Return the section of the attributes."""
        return [self.totals.report_section()]


@EVALUATOR_REGISTRY.register()
class JointAttrEvaluator(ReidEvaluator):
    """Compute the metrics of re-identification and of attributes of a ``JointAttrBaseline``."""

    def __init__(self, cfg: CfgNode, num_query: int, output_dir: str | None = None, **options: Any) -> None:
        self.totals = AttributeTotals(cfg, output_dir)
        super().__init__(cfg, num_query, output_dir, **options)

    def metric_names(self) -> list[str]:
        """List the metrics in percent."""
        return [*super().metric_names(), *METRICS]

    def reset(self) -> None:
        """Discard all features and counts."""
        super().reset()
        self.totals.reset()

    def forward(self, model: Any, batch: dict[str, Any]) -> Any:
        """Compute the features (B, D) and the probabilities (B, A) of a batch."""
        return model.features_and_attributes(batch)

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
        baselines = metrics.get("baselines", {}) | attributes["baselines"]
        return metrics | {name: attributes[name] for name in METRICS} | {"baselines": baselines}

    def report_sections(self) -> list[ReportSection]:
        """Return the section of the attributes."""
        return [self.totals.report_section()]
