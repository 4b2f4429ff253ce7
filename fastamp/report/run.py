"""Data shown in a report."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.config.key import show_value
from fastamp.data.datasets.base import ImageDataset, ImageItem, count_items
from fastamp.data.datasets.items import PackedItems
from fastamp.diagnostics import environment_queries
from fastamp.evaluation import DatasetEvaluator, EvaluationResult, ReidEvaluator, ReportSection
from fastamp.evaluation.calibration_check import CalibrationCheck
from fastamp.report.history import History
from fastamp.utils.env import available_cores

# Longer config values are truncated.
_MAX_VALUE_LENGTH = 160


@dataclass(frozen=True)
class EvaluatedSet:
    """Test set with its evaluation result.

    Attributes:
        name: name in DATASETS.TESTS.
        metrics: metrics returned by the evaluator.
        result: result with details; None for custom evaluators that do not provide one.
        query, gallery: images; empty if unknown.
        source: dataset that names identities and cameras; None to show their numbers.
        calibration_check: error rates of the decisions of a calibrated model.
        sections: further sections of the evaluator.
    """

    name: str
    metrics: dict[str, Any]
    result: EvaluationResult | None
    query: Sequence[ImageItem]
    gallery: Sequence[ImageItem]
    source: ImageDataset | None = None
    calibration_check: CalibrationCheck | None = None
    sections: Sequence[ReportSection] = ()

    def identity(self, pid: int | str) -> str:
        """Return the name of an identity."""
        return self.source.identity(pid) if self.source else str(pid)

    def camera(self, camid: int | str) -> str:
        """Return the name of a camera; "" if the dataset has no cameras."""
        return self.source.camera(camid) if self.source else str(camid)

    @property
    def images(self) -> list[ImageItem]:
        """All images, queries first."""
        return [*self.query, *self.gallery]


@dataclass(frozen=True)
class SheetImage:
    """Image of a contact sheet: its path, a thumbnail, and the thumbnail as a ``data:`` URL."""

    path: str
    picture: Image.Image
    source: str


@dataclass(frozen=True)
class SheetGroup:
    """Contact sheet with a title and a note."""

    title: str
    note: str
    images: Sequence[SheetImage]


@dataclass(frozen=True)
class ClusterSheets:
    """Contact sheets of clusters, and a line above them; see ``fastamp.report.cluster_page.cluster_sheets``."""

    summary: str
    groups: Sequence[SheetGroup]


@dataclass(frozen=True)
class Run:
    """Training run, or evaluation of given weights.

    Attributes:
        cfg: config.
        weights: description of the evaluated weights.
        protocol: one-line description of the protocol.
        policy: precision policy of training, or of the evaluation if there was no training.
        device: device of the model.
        sets: evaluated test sets.
        train: training images; empty if there was no training.
        history: training metrics; None if there are none.
        train_source: dataset of the training images; None if there are several or none.
        clusters: clusters of the training images; None for a training with labels.
    """

    cfg: CfgNode
    weights: str
    protocol: str
    policy: PrecisionPolicy
    device: torch.device
    sets: Sequence[EvaluatedSet]
    train: Sequence[ImageItem] = ()
    history: History | None = None
    train_source: ImageDataset | None = None
    clusters: ClusterSheets | None = None


def evaluated_set(
    name: str, metrics: dict[str, Any], evaluator: DatasetEvaluator, loader: Any, num_query: int
) -> EvaluatedSet:
    """Collect the results and images of a test set, if its evaluator and loader provide them.

    Args:
        name: name in DATASETS.TESTS.
        metrics: metrics returned by the evaluator.
        evaluator: evaluator whose ``result`` is used if it is an ``EvaluationResult``.
        loader: see ``items_of``.
        num_query: number of query images, which come first in the loader. For tracklets, the set contains the first
            frame of each.
    """
    items = items_of(loader)
    result = check = None
    if isinstance(evaluator, ReidEvaluator):
        result, check, first_frames = evaluator.result, evaluator.calibration_check, evaluator.first_frames
        if first_frames is not None and isinstance(items, PackedItems):
            items, num_query = items.take(first_frames), int((first_frames < num_query).sum())
    # Custom evaluators need not be subclasses of DatasetEvaluator.
    sections = evaluator.report_sections() if isinstance(evaluator, DatasetEvaluator) else ()
    return EvaluatedSet(name, metrics, result, items[:num_query], items[num_query:], source_of(loader), check, sections)


def items_of(loader: Any) -> list[ImageItem]:
    """Return the images of a loader's dataset, or an empty list if the dataset has no ``items``."""
    return getattr(getattr(loader, "dataset", None), "items", [])


def source_of(loader: Any) -> ImageDataset | None:
    """Return the dataset whose images a loader loads; None if there are several or it is unknown."""
    sources: Sequence[ImageDataset] = getattr(getattr(loader, "dataset", None), "sources", ())
    return sources[0] if len(sources) == 1 else None


def data_counts(run: Run) -> list[tuple[str, str, int, int, int]]:
    """List ``(dataset, split, number of images, number of identities, number of cameras)`` for all sets."""
    parts = [(", ".join(run.cfg.DATASETS.NAMES), "train", run.train, run.train_source)]
    for test_set in run.sets:
        splits = {"query": test_set.query, "gallery": test_set.gallery}
        parts += [(test_set.name, split, items, test_set.source) for split, items in splits.items()]
    return [(name, split, *count_items(items, source)) for name, split, items, source in parts if items]


def config_changes(cfg: CfgNode) -> list[tuple[str, str, str, str]]:
    """List ``(key, value, default, meaning)`` for the config keys whose values differ from their defaults."""
    return [
        (key.path, _shortened(show_value(value)), _shortened(show_value(key.default)), key.meaning)
        for key, value in cfg.keys_below()
        if value != key.default
    ]


def environment(run: Run) -> dict[str, str]:
    """Collect the device, the precision, the system and the package versions."""
    versions = environment_queries.versions()
    name = environment_queries.device_name(run.device)
    return {
        "Device": f"{run.device} ({name})" if name else str(run.device),
        "Precision": run.policy.describe(),
        "PyTorch built for": environment_queries.build() or "CPU only",
        "System": f"{platform.system()} {platform.machine()}, {available_cores()} cores",
    } | versions


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
