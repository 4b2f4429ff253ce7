"""Evaluators of attributes, with and without re-identification."""

import csv
import logging
import math
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
from fastamp.utils import comm
from fastamp.utils.errors import writing
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
_ROWS = 4096
_MOST_IMAGES, _SHOWN_ERRORS = 24, 4


class AttributeTotals:
    """Counts of a test set over all ranks, with a table of the attributes and the images with the most errors.

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
        """Discard all counts."""
        self.counts = AttributeCounts(len(self.names), self.threshold)
        self._labels = [torch.empty(0, len(self.names), dtype=torch.int8)]
        self._worst = torch.empty(0, 2 + 2 * len(self.names), dtype=torch.float64)
        self._num_images = 0

    def add(self, batch: dict[str, Any], probabilities: torch.Tensor) -> None:
        """Add a batch with the columns of the attributes and its probabilities (B, A)."""
        labels = labels_of(batch, self.attributes, probabilities.device)
        self.counts.add(probabilities, labels)
        # One byte per label; -1 is a missing one.
        self._labels.append(labels.nan_to_num(-1).to(torch.int8).cpu())
        in_order = torch.arange(self._num_images, self._num_images + len(labels))
        self._num_images += len(labels)
        rows = _error_rows(batch.get("indices", in_order), probabilities, labels, self.threshold)
        self._worst = _most_errors(torch.cat((self._worst, rows.cpu())))

    def metrics(self) -> dict[str, Any]:
        """Compute the metrics over all ranks in percent, and write the table of the attributes on rank 0.

        ``baselines`` has the metrics of the prediction of the most frequent value of each column for all images.
        """
        self.total = self.counts.merged(comm.gather_rows(self.counts.state()[None]))
        labels = comm.gather_rows(torch.cat(self._labels)).float()
        self._worst = _most_errors(comm.gather_rows(self._worst))
        if comm.is_main_process():
            unusual = [self.names[index] for index in self.total.one_sided()]
            if unusual:
                logger.warning(
                    "attributes without positive or without negative test images count as 0 in one half of mA: %s.\n"
                    "  fix: add test images with the missing values",
                    ", ".join(unusual),
                )
            self._write(self.total.of_attributes())
        constant = most_frequent_values(self.attributes, self.total.sums[1], self.total.sums[1] + self.total.sums[3])
        baseline = AttributeCounts(len(self.names), self.threshold)
        for rows in labels.split(_ROWS):
            baseline.add(constant.expand_as(rows), rows.where(rows >= 0, torch.nan))
        return self.total.metrics() | {"baselines": {"most frequent values": baseline.metrics()}}

    def report_section(self) -> ReportSection:
        """Return the section of the report, after ``metrics``."""
        of_attributes = self.total.of_attributes()
        columns = ("fraction", "mA", "accuracy", "majority", "precision", "recall", "f1")
        rows = [
            (
                name,
                f"{int(of_attributes['images'][row]):,}",
                *(_percent(of_attributes[column][row].item()) for column in columns),
            )
            for row, name in enumerate(self.names)
        ]
        titles = ("attribute", "images", "positive %", "mA %", "accuracy %", "majority %", "precision %", "recall %")
        return ReportSection(
            "Attributes",
            f"An attribute is predicted from a probability of {self.threshold:g}. mA: mean of the accuracies on "
            "positive and on negative images. Majority: accuracy of always giving the more frequent answer. "
            "–: not defined.",
            [Table("", (*titles, "F1 %"), rows)],
            examples=[self._example(row) for row in self._worst],
            examples_title="Images with the most errors",
        )

    def _example(self, row: torch.Tensor) -> ImageExample:
        """Return an image with its largest errors."""
        probabilities, labels = row[2:].view(2, -1)
        errors = _errors(probabilities, labels, self.threshold)
        wrong = [number for number in errors.argsort(descending=True).tolist() if errors[number] > 0]
        lines = [f"{len(wrong)} of {int(labels.isfinite().sum())} wrong"]
        for number in wrong[:_SHOWN_ERRORS]:
            kind = "missed" if labels[number] > 0.5 else "not"
            lines.append(f"{kind} {self.names[number]}, {100 * probabilities[number]:.0f} %")
        return ImageExample(int(row[0]), lines)

    def _write(self, of_attributes: dict[str, torch.Tensor]) -> None:
        if self.output_dir is None:
            return
        path = Path(self.output_dir) / "attributes.csv"
        columns = ("mA", "fraction", "accuracy", "majority", "precision", "recall", "f1")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(("attribute", "images", "positives", *columns))
                for row, name in enumerate(self.names):
                    values = (_percent(of_attributes[column][row].item(), 2, "") for column in columns)
                    writer.writerow(
                        (name, int(of_attributes["images"][row]), int(of_attributes["positives"][row]), *values)
                    )
        logger.info("wrote %s", path)


def _percent(value: float, digits: int = 1, undefined: str = "–") -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else undefined


def _errors(probabilities: torch.Tensor, labels: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return 1 + the absolute error of wrong predictions, and 0 of others and of missing labels; of the same shape."""
    positive = labels > 0.5
    wrong = (probabilities >= threshold) != positive
    return torch.where(wrong & ~labels.isnan(), 1 + (probabilities - positive.float()).abs(), 0.0)


def _error_rows(
    indices: torch.Tensor, probabilities: torch.Tensor, labels: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Return index, sum of errors, probabilities and labels of each image: (B, 2 + 2 A) float64."""
    total = _errors(probabilities, labels, threshold).sum(1)
    indices = indices.to(labels.device, torch.float64)
    return torch.cat((indices[:, None], total[:, None].double(), probabilities.double(), labels.double()), dim=1)


def _most_errors(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows with the most errors, at most ``_MOST_IMAGES``, without images that have none."""
    rows = rows[rows[:, 1] > 0]
    return rows[rows[:, 1].argsort(descending=True, stable=True)[:_MOST_IMAGES]]


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
