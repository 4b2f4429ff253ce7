"""Accuracy of a classifier."""

from typing import Any

import torch

from fastamp.config import CfgNode
from fastamp.evaluation import EVALUATOR_REGISTRY, CountMatrix, DatasetEvaluator, ImageExample, ReportSection, Table
from fastamp.feature_pass import Rows
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError

# Numbers k of the accuracies Acc@k; Acc@5 of at least twice as many classes.
_TOP = (1, 5)
# Classes in the confusion matrix of the report; of more classes, the pairs that are confused most often are shown.
_MATRIX_CLASSES, _CONFUSED_PAIRS, _MOST_IMAGES = 30, 20, 24


@EVALUATOR_REGISTRY.register()
class ClasEvaluator(DatasetEvaluator):
    """Accuracy in percent: ``Acc@1``, and ``Acc@5`` of at least 10 classes.

    ``baselines`` has the accuracy of always answering with the most frequent classes of the test set.

    Args:
        cfg: config.
        num_query: unused.
        output_dir: unused.
    """

    def __init__(self, cfg: CfgNode, num_query: int = 0, output_dir: str | None = None) -> None:
        self.head, self.names = cfg.MODEL.HEADS.NAME, tuple(cfg.DATASETS.CLASSES)
        self.reset()

    @classmethod
    def describe_protocol(cls, cfg: CfgNode) -> str:
        """Describe the evaluation in one line."""
        return "accuracy of the classifier"

    def metric_names(self) -> list[str]:
        """List the names of the metrics."""
        return [f"Acc@{k}" for k in _top(len(self.names))] + ["metric"]

    def reset(self) -> None:
        """Discard all accumulated batches."""
        self._rows = Rows()
        self._num_classes = len(self.names)
        self.table = torch.empty(0, 5, dtype=torch.float64)

    def process(self, inputs: dict[str, Any], outputs: torch.Tensor) -> None:
        """Accumulate one batch of logits, (B, K), and of ``targets``, (B,) int64.

        Raises:
            ConfigError: if the model returns no logits of the classes.
        """
        if self.names and outputs.shape[1] != len(self.names):
            raise ConfigError(
                f"ClasEvaluator: expected logits of {len(self.names)} classes, got {outputs.shape[1]} values from "
                f"MODEL.HEADS.NAME={self.head}.\n  fix: set MODEL.HEADS.NAME to ClasHead"
            )
        self._num_classes = outputs.shape[1]
        logits, labels = outputs.double(), inputs["targets"].to(outputs.device)
        target_logits = logits.gather(1, labels[:, None])
        # Equal logits are ranked in the order of the classes, as by argmax.
        first = torch.arange(self._num_classes, device=labels.device) < labels[:, None]
        ranks = ((logits > target_logits) | ((logits == target_logits) & first)).sum(1)
        predicted = logits.argmax(1)
        confidence = logits.softmax(1).gather(1, predicted[:, None])[:, 0]
        columns = torch.stack([column.double() for column in (labels, predicted, ranks, confidence)], dim=1)
        self._rows.append({"indices": self._rows.positions(inputs, len(labels)), "columns": columns})

    def evaluate(self) -> dict[str, Any] | None:
        """Compute the accuracies in percent over all ranks; return None on ranks other than 0."""
        gathered = self._rows.gather()
        if gathered:
            self.table = torch.cat((gathered["indices"].double()[:, None], gathered["columns"]), dim=1)
        if not comm.is_main_process():
            return None
        images = max(1, len(self.table))
        counts = self.table[:, 1].long().bincount(minlength=self._num_classes).sort(descending=True).values
        top = _top(self._num_classes)
        accuracies = {f"Acc@{k}": 100.0 * int((self.table[:, 3] < k).sum()) / images for k in top}
        baseline = {f"Acc@{k}": 100.0 * int(counts[:k].sum()) / images for k in top}
        return accuracies | {"metric": accuracies["Acc@1"], "baselines": {"most frequent class": baseline}}

    def report_sections(self) -> list[ReportSection]:
        """Return the section of the classes, with their confusion matrix and the most confident errors."""
        labels, predicted = self.table[:, 1].long(), self.table[:, 2].long()
        number = self._num_classes
        names = self.names or tuple(map(str, range(number)))
        counts = (labels * number + predicted).bincount(minlength=number * number).view(number, number)
        tables, matrix = [_class_table(names, counts)], None
        if number <= _MATRIX_CLASSES:
            note = "Percentage of the images of a class (row) that are predicted as each class (column)."
            matrix = CountMatrix("Confusion matrix", note, "class", names, names, counts)
        else:
            tables.append(_confused_pairs(names, counts))
        errors = self.table[labels != predicted]
        errors = errors[errors[:, 4].argsort(descending=True, stable=True)[:_MOST_IMAGES]]
        examples = [
            ImageExample(int(index), (f"{names[int(answer)]}, {100 * confidence:.0f} %", f"is {names[int(label)]}"))
            for index, label, answer, _, confidence in errors.tolist()
        ]
        return [
            ReportSection(
                "Classes", tables=tables, matrix=matrix, examples=examples, examples_title="Most confident errors"
            )
        ]


def _top(number: int) -> list[int]:
    """Return the numbers k of the accuracies of ``number`` classes."""
    return [k for k in _TOP if k == 1 or 2 * k <= number]


def _class_table(names: tuple[str, ...], counts: torch.Tensor) -> Table:
    """Return the images, recall and precision of each class."""
    columns = (column.tolist() for column in (counts.diagonal(), counts.sum(1), counts.sum(0)))
    rows = [
        (name, f"{images:,}", *(f"{100 * hits / count:.1f}" if count else "–" for count in (images, predicted)))
        for name, hits, images, predicted in zip(names, *columns, strict=True)
    ]
    return Table("", ("class", "images", "recall %", "precision %"), rows)


def _confused_pairs(names: tuple[str, ...], counts: torch.Tensor) -> Table:
    """Return the pairs of different classes with the most errors."""
    number = len(names)
    errors = counts.clone().fill_diagonal_(0)
    order = errors.flatten().argsort(descending=True, stable=True)[:_CONFUSED_PAIRS].tolist()
    rows = [
        (names[label], names[answer], f"{errors[label, answer]:,}", f"{counts[label].sum():,}")
        for label, answer in (divmod(pair, number) for pair in order)
        if errors[label, answer]
    ]
    return Table("Most frequent confusions", ("class", "predicted as", "images", "images of the class"), rows)
