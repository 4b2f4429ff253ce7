"""What a report is made of."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.config.describe import show_value
from fastamp.data.datasets.base import ImageItem, count_items
from fastamp.diagnostics import environment_queries
from fastamp.evaluation import DatasetEvaluator, EvaluationResult
from fastamp.report.history import History
from fastamp.utils.env import available_cores
from fastamp.utils.moved import renamed_arguments, renamed_attribute

# Characters of a config's value that are shown.
_MAX_VALUE_LENGTH = 160


@renamed_arguments(judgement="result")
@dataclass(frozen=True)
class EvaluatedSet:
    """A test set and what became of it.

    Attributes:
        name: as in DATASETS.TESTS.
        metrics: what its evaluator returned.
        result: with details; None where the evaluator, one of the user's own, has none.
        query, gallery: its images; empty where they are not known.
    """

    name: str
    metrics: dict[str, Any]
    result: EvaluationResult | None
    query: Sequence[ImageItem]
    gallery: Sequence[ImageItem]
    judgement = renamed_attribute("judgement", "result")

    @property
    def images(self) -> list[ImageItem]:
        """All of them, the queries first."""
        return [*self.query, *self.gallery]


@dataclass(frozen=True)
class Run:
    """A training, or an evaluation of weights.

    Attributes:
        cfg: its config.
        weights: what was evaluated, in words.
        protocol: how was measured, in one line.
        policy: the precision of training, or of the evaluation where nothing was trained.
        device: that the model is on.
        sets: evaluated.
        train: images trained on; empty where nothing was trained.
        history: of the training; None where there is none.
    """

    cfg: CfgNode
    weights: str
    protocol: str
    policy: PrecisionPolicy
    device: torch.device
    sets: Sequence[EvaluatedSet]
    train: Sequence[ImageItem] = ()
    history: History | None = None


def evaluated_set(
    name: str, metrics: dict[str, Any], evaluator: DatasetEvaluator, loader: Any, num_query: int
) -> EvaluatedSet:
    """Collect the results and images of a test set; custom evaluators and loaders may provide neither.

    Args:
        name: as in DATASETS.TESTS.
        metrics: returned by the evaluator.
        evaluator: its ``result`` is used if it is an ``EvaluationResult``.
        loader: see ``items_of``.
        num_query: number of query images, which come first in the loader.
    """
    items = items_of(loader)
    result = getattr(evaluator, "result", None)
    result = result if isinstance(result, EvaluationResult) else None
    return EvaluatedSet(name, metrics, result, items[:num_query], items[num_query:])


def items_of(loader: Any) -> list[ImageItem]:
    """Return the images of a loader's data set, or an empty list if the data set has no ``items``."""
    return getattr(getattr(loader, "dataset", None), "items", [])


def data_counts(run: Run) -> list[tuple[str, str, int, int, int]]:
    """Return data set, split, images, identities, cameras of all that was trained and evaluated on."""
    parts = [(", ".join(run.cfg.DATASETS.NAMES), "train", run.train)]
    for each in run.sets:
        parts += [(each.name, "query", each.query), (each.name, "gallery", each.gallery)]
    return [(name, split, *count_items(items)) for name, split, items in parts if items]


def config_changes(cfg: CfgNode) -> list[tuple[str, str, str, str]]:
    """Return key, value, default and meaning of what a config has otherwise than the defaults."""
    return [
        (key.path, _shortened(show_value(value)), _shortened(show_value(key.default)), key.meaning)
        for key, value in cfg.keys_below()
        if value != key.default
    ]


def environment(run: Run) -> dict[str, str]:
    """Return what the run was made with."""
    versions = environment_queries.versions()
    name = environment_queries.device_name(run.device)
    return {
        "Device": f"{run.device} ({name})" if name else str(run.device),
        "Precision": run.policy.describe(),
        "PyTorch built for": environment_queries.build() or "the CPU alone",
        "System": f"{platform.system()} {platform.machine()}, {available_cores()} cores",
    } | versions


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
